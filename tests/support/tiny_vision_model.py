"""A vision-language model of transformers, as small as its architecture allows, and what it reads of images."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import SIZES
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

VOCAB = 68
START, END, IMAGE, VIDEO = range(64, VOCAB)
#: Patches of an image in time, height and width; each 2 x 2 of them are one token.
GRIDS = ((1, 4, 4), (1, 4, 8))
_PATCH_VALUES = 3 * 2 * 4 * 4


def tiny_vision_model() -> Any:
    """A Qwen2.5-VL of one layer for images and one for text, in evaluation mode."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = SIZES | {"vocab_size": VOCAB, "initializer_range": 0.3, "rope_parameters": rope}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.3,
    }
    ids = {"vision_start_token_id": START, "vision_end_token_id": END, "image_token_id": IMAGE, "video_token_id": VIDEO}
    config = Qwen2_5_VLConfig(text_config=text | {"eos_token_id": 1, "pad_token_id": 0}, vision_config=vision, **ids)
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def image_tokens(grid: tuple[int, int, int]) -> list[int]:
    """The tokens of an image in a prompt."""
    return [START, *[IMAGE] * (grid[0] * grid[1] * grid[2] // 4), END]


def pixels(grids: list[tuple[int, int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """The arguments for some images: patches (P, C), and grids (images, 3) int64."""
    values = torch.randn(sum(t * h * w for t, h, w in grids), _PATCH_VALUES, generator=torch.manual_seed(seed))
    return {"pixel_values": values, "image_grid_thw": torch.tensor(grids)}
