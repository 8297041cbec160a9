"""The largest calls of the vocabulary's losses in `fastrl train`."""

from fastrl import Objective
from fastrl.objectives.row_local import TOKEN, Given, scope, slopes
from fastrl.training.batches.loss_calls import LossCall
from fastrl.training.config.objective import ranks_tokens, reads_sampler
from fastrl.training.config.train import Config
from fastrl.training.models.teacher import teacher_width


def loss_calls(config: Config, objective: Objective, tokens: int) -> list[LossCall]:
    """The largest calls of the vocabulary's losses that the config allows, in micro-batches of so many tokens."""
    longest, packing, calls = config.rollout.max_new_tokens, config.training.packing, list[LossCall]()
    # A micro-batch's completions, all of them at their longest; one that is longer than the limit is on its own.
    whole = config.minibatch * longest
    most = whole if ranks_tokens(objective) else min(max(tokens, longest), whole)
    logprobs = LossCall("log-probabilities", most, most, longest, packing, gradients=False, truncated=config.rollout)
    logprobs = logprobs._replace(batch_invariant=config.training.batch_invariant)
    loss = logprobs._replace(gradients=True, own_leaf=True)
    if config.has_policy_loss:
        uneven = config.distils_samples or config.advantages.per_token
        given = Given(not config.on_policy, reads_sampler(objective), uneven=uneven)
        calls.append(loss._replace(what="the policy's loss", scope=scope(objective, given), slopes=slopes(objective)))
        if config.needs_old_logprobs or config.needs_gradient_norms or config.needs_reference(objective):
            calls.append(logprobs)
    if (distillation := config.distillation) is not None:
        width = teacher_width(distillation, config.model)
        # A divergence is over the whole vocabulary, whatever the sampling leaves.
        truncated = config.rollout if config.distils_samples else None
        what = "the teacher's log-probabilities"
        calls.append(logprobs._replace(what=what, width=width, truncated=truncated, batch_invariant=False))
        if distillation.form == "full":
            calls.append(loss._replace(what="the divergence", scope=TOKEN, teacher=width, truncated=None))
        elif distillation.form == "top-k":
            what, entries = "log-probabilities of the teacher's entries", distillation.top_k
            calls.append(loss._replace(what=what, entries=entries, truncated=None))
    if (pretraining := config.pretraining) is not None:
        length = pretraining.length - 1
        most = pretraining.batch_size * length
        calls.append(
            LossCall(
                "pretraining's loss", most, most, length, False, TOKEN, batch_invariant=config.training.batch_invariant
            )
        )
    return calls
