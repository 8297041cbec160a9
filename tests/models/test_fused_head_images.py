"""A fused head on a model that reads images: they reach the decoder with their places, and get their gradients."""

import torch
from fused_heads import assert_gradients_close, gradients
from tiny_vision_model import GRIDS, IMAGE, START, image_tokens, pixels, tiny_vision_model

from fastrl.integrations.transformers import compute_loss_func, fused_lm_head


def make_batch():
    """Two prompts with an image each, the first with the smaller one and padding on the left."""
    rows = [image_tokens(grid) + answer for grid, answer in zip(GRIDS, ([5, 6, 7], [8, 9, 10]), strict=True)]
    longest = max(map(len, rows))
    input_ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    images = pixels(list(GRIDS))
    types = {"mm_token_type_ids": (input_ids == IMAGE).long()}
    labels = input_ids.masked_fill((input_ids == 0) | (input_ids >= START), -100)
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), **images, **types, "labels": labels}


def test_loss_and_gradients_are_the_models_own():
    model, batch = tiny_vision_model(), make_batch()
    own = model(**batch).loss
    expected = gradients(model, own)
    fused_lm_head(model)
    out = model(**batch, return_token_stats=True)
    assert out.logits is None and out.logprobs.shape == batch["input_ids"].shape
    found = {"stats": (out.loss, gradients(model, out.loss))}
    loss_of = compute_loss_func(model.train())
    labels = batch.pop("labels")
    loss = loss_of(model(**batch), labels)
    found["trainer"] = loss, gradients(model, loss)
    assert any("visual" in name for name in expected)
    for loss, values in found.values():
        torch.testing.assert_close(loss, own, rtol=1e-5, atol=0)
        assert_gradients_close(values, expected)


def test_other_images_and_other_places_are_other_losses():
    """Else the comparison above would hold for a decoder that never saw them."""
    model, batch = fused_lm_head(tiny_vision_model()), make_batch()
    loss = model(**batch, return_token_stats=True).loss.item()
    for change in (
        pixels(list(GRIDS), seed=1),
        {"image_grid_thw": torch.tensor([(1, 4, 4), (1, 8, 4)])},
        {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand(3, 2, -1)},
    ):
        other = model(**batch | change, return_token_stats=True).loss.item()
        assert abs(other - loss) > 1e-4 * loss, change.keys()
