"""The support of each token, recorded at the sampler: Keep Sampling Mask of DeepSeek-V3.2.

A rollout engine that truncates (top-p, top-k, min-p) draws each token from a few entries of the vocabulary, the token's
support. Training normalises over the same entries, for the current, the old and the reference policy alike
(arXiv:2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import entry_rows, offsets_of
from fastrl.base import checks
from fastrl.sampling_mask import sources as sampling_sources
from fastrl.sampling_mask.csr import INT32_MAX, check_layout, row_of, sorted_csr


class _Facts(NamedTuple):
    """Facts about a mask, read to the host when it is built, so that no call has to synchronise again."""

    largest_id: int  # -1 if there are no ids
    longest: int  # entries in the longest row
    unrecorded: int  # rows without a support


class SamplingMask:
    """The recorded supports of N tokens, in vLLM's layout: ids row by row, and the offset of each row.

    Rows are the flattened leading dimensions of targets. A row without ids was not recorded and means the whole
    vocabulary. Ids are checked once, here. They may be unsorted and repeated; they are stored sorted and distinct.

    Args:
        token_ids: (nnz,) integers in [0, 2^31), stored as int32.
        offsets: (N + 1,) integers from 0 to nnz that never decrease, stored as int64; row i is
            token_ids[offsets[i]:offsets[i + 1]].

    Raises:
        TypeError, ValueError: names the argument, and the row if one is wrong.
    """

    def __init__(self, token_ids: Tensor, offsets: Tensor) -> None:
        check_layout(token_ids, offsets)
        token_ids, offsets = token_ids.detach(), offsets.detach().long().contiguous()
        rows = entry_rows(offsets, token_ids.shape[0])
        if bool((((rows << 32) | token_ids).diff() <= 0).any()):
            token_ids, offsets = sorted_csr(rows, token_ids, offsets.shape[0] - 1)
        # Copies: the checked values must not change with the caller's memory.
        self.token_ids = token_ids.to(torch.int32, copy=True).contiguous()
        self.offsets = offsets.clone()
        self._facts = _facts(self.token_ids, self.lengths)

    @classmethod
    def _made(cls, token_ids: Tensor, offsets: Tensor, facts: _Facts | None = None) -> SamplingMask:
        """From a CSR whose ids are sorted and distinct already."""
        mask = cls.__new__(cls)
        mask.token_ids, mask.offsets = token_ids, offsets
        mask._facts = _facts(token_ids, offsets.diff()) if facts is None else facts
        return mask

    # --- where supports come from; `fastrl.sampling_mask.sources` reads them ----------------------------------------

    @classmethod
    def from_lists(cls, lists: Any, device: torch.device | str | None = None) -> SamplingMask:
        """From lists of ids per token, as in SGLang's `output_token_sampling_mask`; None or [] = token not recorded.

        Args:
            lists: a list (or an array) of ids per token; or a list of such lists, one per completion, whose rows are
                concatenated in their order. Also SGLang's `meta_info`, the whole response that holds it, or a list of
                these; and any of these as JSON text.
            device: the device of the mask; None = CPU.

        Returns:
            A mask with one row per token.

        Raises:
            ValueError: if ids are not integers in [0, 2^31); if a whole completion is None (JSON's null), with the
                option that makes SGLang record.
            TypeError: for any other input.
        """
        return cls(*sampling_sources.listed_record(lists).csr(device))

    @classmethod
    def from_vllm(cls, mask: Any, device: torch.device | str | None = None) -> SamplingMask:
        """From vLLM's output: the `sampling_mask` of one completion or of several, in any layout that vLLM has used.

        For a list of completions the rows are concatenated in the list's order, as in a packed batch. For a padded
        batch use `SamplingMask.padded([SamplingMask.from_vllm(c) for c in completions], length)`.

        Args:
            mask: `completion.sampling_mask`, whose `token_ids` hold a list of ids per token (vLLM 0.28 to 0.33), or
                are flat with separate `offsets`; the completion itself, which must have as many rows as tokens, or the
                request's output that holds it; the server's response at `/inference/v1/generate`, whole or in part, as
                parsed JSON or as text; nested lists or arrays of ids; or a list of any of these. Lists nested two deep
                are one completion, three deep several. Only a completion without tokens may have no mask.
            device: the device of the mask; None = CPU.

        Returns:
            A mask with one row per token.

        Raises:
            ValueError: if a mask is None or null, with the option that makes vLLM record; if ids are not integers in
                [0, 2^31); if the number of rows is not the number of tokens.
            TypeError: for any other input.
        """
        return cls(*sampling_sources.vllm_record(mask).csr(device))

    @classmethod
    def from_dense(cls, kept: Tensor) -> SamplingMask:
        """From a dense mask of the vocabulary.

        Args:
            kept: (..., V) bool, True = kept.

        Returns:
            A mask of the flattened rows, on the same device.

        Raises:
            TypeError, ValueError: a wrong dtype or shape; a row that keeps nothing.
        """
        return cls._made(*sampling_sources.support_of_dense(kept))

    @classmethod
    def from_scores(cls, scores: Sequence[Tensor]) -> SamplingMask:
        """From `generate(..., output_scores=True, return_dict_in_generate=True).scores`: T steps of (B, V).

        Entries that the warpers left above -inf are kept. A row that keeps everything is stored as not recorded, which
        means the same.

        Args:
            scores: T tensors (B, V), floating point, one per step.

        Returns:
            A mask of B T rows, those of (B, T), flattened.

        Raises:
            TypeError, ValueError: wrong scores; a row, which is named, that keeps nothing.
        """
        return cls._made(*sampling_sources.support_of_scores(scores))

    @classmethod
    def from_logits(
        cls, logits: Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, temperature: float = 1.0
    ) -> SamplingMask:
        """What a sampler keeps of logits (..., V): temperature, top-k, top-p and min-p in this order, without a sort.

        The result equals Hugging Face's warpers' except for which of the entries tied at the top-p threshold stay (here
        the lowest indices are dropped first, as by a stable sort); the number that stays is equal. If no option
        truncates, no row is recorded.

        Args:
            logits: (..., V) float32, bfloat16 or float16; no gradient flows.
            top_p: in (0, 1]; the most likely entries whose probabilities sum to at least this; 1 = off.
            top_k: the k largest entries, and those tied with the k-th; 0 = off.
            min_p: in [0, 1]; the entries with at least this fraction of the largest probability; 0 = off.
            temperature: above 0, divides the logits first.

        Returns:
            A mask of the flattened rows, on the same device.

        Raises:
            TypeError, ValueError: if an option is wrong; if a row, which is named, holds a NaN, +inf or only -inf (rows
                are not read if no option truncates).
        """
        return cls._made(*sampling_sources.support_of_logits(logits, top_p, top_k, min_p, temperature))

    # --- as a collection of rows ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """The device of the ids."""
        return self.token_ids.device

    @property
    def lengths(self) -> Tensor:
        """(N,) int64: the number of entries each row keeps; 0 = not recorded."""
        return self.offsets.diff()

    def __repr__(self) -> str:
        recorded = len(self) - self._facts.unrecorded
        mean = self.token_ids.shape[0] / recorded if recorded else 0.0
        return f"SamplingMask({len(self)} rows, {recorded} recorded, {mean:.1f} ids a recorded row, {self.device})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return torch.equal(self.offsets, other.offsets) and torch.equal(self.token_ids, other.token_ids)

    __hash__ = None  # type: ignore[assignment]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SamplingMask:
        """The same mask on another device.

        Args:
            device: the device.
            non_blocking: as in `torch.Tensor.to`.

        Returns:
            A new mask.
        """
        token_ids = self.token_ids.to(device, non_blocking=non_blocking)
        return self._made(token_ids, self.offsets.to(device, non_blocking=non_blocking), self._facts)

    def state_dict(self) -> dict[str, Tensor]:
        """Two plain tensors to save with a batch; `SamplingMask(**state)` restores the mask."""
        return {"token_ids": self.token_ids, "offsets": self.offsets}

    def index(self, rows: Tensor) -> SamplingMask:
        """Select rows by their indices, or by a mask.

        Args:
            rows: int64 or int32 indices of any shape and order (repeats allowed, negative from the end), or bool (N,).

        Returns:
            A mask of the selected rows.

        Raises:
            TypeError, ValueError: rows of the wrong dtype or shape.
            IndexError: an index outside [-N, N).
        """
        rows = checks.tensor("rows", rows, (torch.bool, torch.int64, torch.int32))
        if rows.dtype == torch.bool:
            checks.shape("rows", rows.reshape(-1), (len(self),), "one per row of the mask")
            rows = rows.reshape(-1).nonzero()[:, 0]
        rows = rows.reshape(-1).to(self.device).long()
        outside = (rows < -len(self)) | (rows >= len(self))
        if bool(outside.any()):
            raise IndexError(f"rows must be in [{-len(self)}, {len(self)}), got {int(rows[outside][0])}")
        rows = rows % max(len(self), 1)
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        total = int(offsets[-1])
        entries = torch.arange(total, device=self.device)
        entries += (self.offsets[rows] - offsets[:-1]).repeat_interleave(lengths, output_size=total)
        return self._made(self.token_ids[entries], offsets)

    @classmethod
    def concat(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenate the rows of all masks.

        Args:
            masks: at least one SamplingMask, all on one device.

        Returns:
            A mask of all their rows.

        Raises:
            TypeError, ValueError: no masks, something else among them, or another device.
        """
        masks = list(masks)
        if not masks:
            raise ValueError("masks must hold at least one SamplingMask, got none")
        for i, mask in enumerate(masks):
            if not isinstance(mask, SamplingMask):
                raise TypeError(f"masks[{i}] must be a SamplingMask, got {type(mask).__name__}")
            if mask.device != masks[0].device:
                raise ValueError(f"masks[{i}] must be on {masks[0].device} like masks[0], got {mask.device}")
        lengths = torch.cat([mask.lengths for mask in masks])
        facts = _Facts(
            max(mask._facts.largest_id for mask in masks),
            max(mask._facts.longest for mask in masks),
            sum(mask._facts.unrecorded for mask in masks),
        )
        return cls._made(torch.cat([mask.token_ids for mask in masks]), offsets_of(lengths), facts)

    @classmethod
    def padded(cls, masks: Sequence[SamplingMask], length: int) -> SamplingMask:
        """B responses' masks as the rows of a padded batch; padding rows are not recorded.

        Args:
            masks: one SamplingMask per response, of at most `length` rows.
            length: of the batch, in tokens.

        Returns:
            A mask of the rows (B, length), flattened.

        Raises:
            TypeError, ValueError: as `concat`; a wrong length, or a mask that is longer.
        """
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length must be an int, got {type(length).__name__}")
        for i, mask in enumerate(masks):
            if isinstance(mask, SamplingMask) and len(mask) > length:
                raise ValueError(f"masks[{i}] must have at most length={length} rows, got {len(mask)}")
        joined = cls.concat(masks)
        lengths = torch.zeros(len(masks), length, dtype=torch.int64, device=joined.device)
        for row, mask in zip(lengths, masks, strict=True):
            row[: len(mask)] = mask.lengths
        return cls._made(joined.token_ids, offsets_of(lengths.view(-1)))

    def to_dense(self, vocab_size: int) -> Tensor:
        """The dense mask. Large: for inspection and tests.

        Args:
            vocab_size: V.

        Returns:
            bool (N, V), True = kept; rows that were not recorded are all True.

        Raises:
            ValueError: a wrong vocab_size, or an id outside it.
        """
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size must be an int of at least 1, got {vocab_size!r}")
        self.check_vocab(vocab_size)
        kept = (self.lengths == 0)[:, None].repeat(1, vocab_size)
        kept[self._rows(), self.token_ids.long()] = True
        return kept

    def with_targets(self, targets: Tensor, mask: Tensor | None = None) -> SamplingMask:
        """The same mask with each recorded row's target added to its support, for tokens that were forced, not drawn.

        Args:
            targets: int64, one per row, in any shape.
            mask: bool or 0/1, shaped like targets; targets where it is 0 are not read.

        Returns:
            A new mask.

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape, device or value.
        """
        with checks.check_inputs():  # what follows waits for the device too
            valid = None if mask is None else checks.mask(mask, checks.tensor("targets", targets, (torch.int64,)))
        targets = checks.tensor("targets", targets, (torch.int64,)).reshape(-1)
        checks.shape("targets", targets, (len(self),), "one per row of the mask")
        checks.same_device("targets", targets, self.token_ids, "the mask")
        recorded = self.lengths > 0 if valid is None else (self.lengths > 0) & valid.reshape(-1)
        bad = recorded & ((targets < 0) | (targets > INT32_MAX))
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(f"targets[{row}] must be a token id in [0, 2^31), got {int(targets[row])}")
        rows = torch.cat([self._rows(), recorded.nonzero()[:, 0]])
        return self._made(*sorted_csr(rows, torch.cat([self.token_ids, targets[recorded]]), len(self)))

    @property
    def longest(self) -> int:
        """The number of entries in the longest row."""
        return self._facts.longest

    @property
    def unrecorded(self) -> int:
        """The number of rows without a support."""
        return self._facts.unrecorded

    def check_vocab(self, vocab: int) -> None:
        """Check that all ids are in a vocabulary.

        Args:
            vocab: the size of the vocabulary.

        Raises:
            ValueError: an id is outside [0, vocab); the message names the first row.
        """
        if self._facts.largest_id >= vocab:
            entry = int((self.token_ids >= vocab).nonzero()[0])
            row, token = row_of(self.offsets, entry), int(self.token_ids[entry])
            raise ValueError(f"sampling_mask row {row} has token id {token}, outside the vocabulary [0, {vocab})")

    def _rows(self) -> Tensor:
        """(nnz,) int64: the row of each id."""
        return entry_rows(self.offsets, self.token_ids.shape[0])


def _facts(token_ids: Tensor, lengths: Tensor) -> _Facts:
    """The facts of a mask, in one synchronisation."""
    largest = token_ids.amax().long() if token_ids.shape[0] else lengths.new_full((), -1)
    longest = lengths.amax() if lengths.shape[0] else lengths.new_zeros(())
    return _Facts(*torch.stack([largest, longest, (lengths == 0).sum()]).tolist())
