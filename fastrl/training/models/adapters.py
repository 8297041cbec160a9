"""peft's adapters in a directory: their base model, and their merging into it."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import find_adapter_config_file

from fastrl.base.errors import UserError
from fastrl.training.config.settings import looks_like_path
from fastrl.training.models.differences import check_weights, listed
from fastrl.training.models.names import cannot_load, read_object


def with_merged(model: Any, name: str) -> Any:
    """The model with the adapters of `name` merged into its weights: like any other, with the logits it has in peft."""
    try:
        from peft import PeftConfig, PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.save_and_load import load_peft_weights
    except ImportError as error:
        raise UserError(f"{name}: holds adapters, which need peft ({error}): pip install peft") from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, of a head that is the embedding
        try:
            settings = PeftConfig.from_pretrained(name)
            if settings.is_prompt_learning:
                raise UserError(f"{name}: adapters of kind {settings.peft_type.value} cannot be merged into weights")
            wrapped = PeftModel(model, settings)
            _fill(wrapped, name, load_peft_weights(name, device="cpu"))
            if tied:  # merging changes weights in place, and adapters may tell the two apart
                head.weight = torch.nn.Parameter(head.weight.detach().clone())
            merged: Any = wrapped.merge_and_unload(safe_merge=True)
            if left := [key for key, module in merged.named_modules() if isinstance(module, BaseTunerLayer)]:
                raise UserError(f"{name}: peft cannot merge the adapters of several kinds on {listed(left)}")
        except UserError:
            raise
        except Exception as error:  # as for the model; and a kind that the installed peft does not know or cannot merge
            raise cannot_load("adapters", name, error) from error
    if tied:
        embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        still = torch.equal(head.weight, embedding.weight)
        if still:
            head.weight = embedding.weight
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = still
    return merged.requires_grad_(True)


def _fill(wrapped: Any, name: str, adapters: dict[str, Tensor]) -> None:
    """Load adapters into peft's wrapper around a model. Raises UserError unless they are what its config names."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    shapes = [
        (key, adapters[key].shape, tensor.shape)
        for key, tensor in expected.items()
        if key in adapters and adapters[key].shape != tensor.shape
    ]
    loaded: Any = None if shapes else set_peft_model_state_dict(wrapped, adapters)
    differences = {
        "missing_keys": expected.keys() - adapters.keys(),
        "unexpected_keys": () if shapes else loaded.unexpected_keys,
        "mismatched_keys": shapes,
    }
    check_weights(name, wrapped.get_base_model(), differences, "")


def base_of_adapters(name: str) -> str | None:
    """The base model of the adapters that a directory or a repository on the hub holds, or None if it holds none."""
    try:
        file = find_adapter_config_file(name)
    except OSError as error:  # no name that the hub could have
        raise cannot_load("model", name, error) from error
    if file is None:
        return None
    base = read_object(Path(file)).get("base_model_name_or_path")
    if not isinstance(base, str) or (looks_like_path(base) and not os.path.isdir(base)):
        raise UserError(f"{file}: base_model_name_or_path: no such directory, {base!r}")
    if find_adapter_config_file(base) is not None:
        raise UserError(f"{file}: base_model_name_or_path: {base} holds adapters itself; merge them into their base")
    return base
