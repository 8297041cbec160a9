"""A frozen teacher beside its policy."""

from dataclasses import replace

from fastrl.base.errors import UserError
from fastrl.training.config.sections import ModelConfig, TeacherConfig
from fastrl.training.models.loading import load_config, load_tokenizer
from fastrl.training.models.names import name_of
from fastrl.training.models.policy import Policy, check_token_ids, load_policy
from fastrl.training.parallel.world import ALONE, World


def check_teacher(settings: TeacherConfig, model: ModelConfig) -> None:
    """Raise UserError unless a teacher's tokenizer is that of the model, before weights are loaded.

    Their heads may have different numbers of entries (padding), but both need one for each of the tokenizer's ids.
    """
    name, teacher = settings.teacher, teacher_model(settings, model)
    own, theirs = (load_tokenizer(config).get_vocab() for config in (model, teacher))
    different = sorted(token for token in {*own, *theirs} if own.get(token) != theirs.get(token))
    if different:
        token = min(different, key=lambda token: (min(own.get(token, len(own)), theirs.get(token, len(theirs))), token))
        ids = [f"the id {found[token]}" if token in found else "none" for found in (theirs, own)]
        raise UserError(
            f"distillation.teacher: {name}: expected the tokenizer of {name_of(model)}, got another one: {token!r} has "
            f"{ids[0]}, expected {ids[1]} ({len(different)} tokens differ)"
        )
    size = getattr(load_config(teacher).get_text_config(), "vocab_size", None)
    if size is not None:
        check_token_ids(list(theirs.values()), size, f"distillation.teacher: {name}")


def load_teacher(
    settings: TeacherConfig, model: ModelConfig, policy: Policy, packing: bool, world: World = ALONE
) -> Policy:
    """Load a teacher beside its policy: on its device, with its type of products, and frozen.

    Its head has at most as many entries as the policy's; those left out are padding, beyond the tokenizer's ids. Raises
    UserError for a model that cannot be a teacher.
    """
    teacher = load_policy(teacher_model(settings, model), policy.device, packing=packing, world=world)
    teacher.model.requires_grad_(False)
    return replace(teacher, vocabulary=min(teacher.vocabulary, policy.vocabulary))


def teacher_model(settings: TeacherConfig, model: ModelConfig) -> ModelConfig:
    """The teacher as a model, with what the policy's table says of a machine."""
    shared = {name: getattr(model, name) for name in ("dtype", "logits_dtype", "trust_remote_code", "attention")}
    return ModelConfig(path=settings.teacher, **shared)


def teacher_width(settings: TeacherConfig, model: ModelConfig) -> int:
    """The size of the teacher's hidden states; 0 if its config does not say."""
    return getattr(load_config(teacher_model(settings, model)).get_text_config(), "hidden_size", None) or 0
