"""The output matrix of a stage that several devices share: of few rows each multiplies by a part.

    device i    logits of its tokens of the vocabulary, zeros for the others'     [R, V]
    sum         all logits, on every device

The first device has the whole matrix, by which it takes more rows, scores and verifies alone; its
part is a view of that. Values are the same: a sum with zeros is exact.

Legend: R rows, h hidden, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from llmpq.runtime.models.layers import Head, without
from llmpq.runtime.models.linear import Linear, Reduce

MOST_ROWS = 16
"""Of more rows the logits take longer to sum than the matrix to read."""


class CutHead:
    """A device's part of the head."""

    def __init__(self, own: Head, first: int, vocab: int, reduce: Reduce) -> None:
        """`own`: of the tokens from number `first` on; those that it suppresses are of all."""
        self._suppressed_N, own.suppressed_N = own.suppressed_N, None
        self._own, self._first, self._vocab, self._reduce = own, first, vocab, reduce
        self.is_everywhere = False
        """Whether every device of the stage has its part: until that is known none uses it."""

    @classmethod
    def of_whole(cls, head: Head, tokens: range, reduce: Reduce) -> CutHead | None:
        """Return the part of a head that is there as a whole; None where its weight is packed."""
        matrix_Vh, bias_V = head.output.weight.matrix, head.output.bias
        if matrix_Vh is None:
            return None
        part = slice(tokens.start, tokens.stop)
        output = Linear(matrix_Vh[part], None if bias_V is None else bias_V[part])
        own = Head(
            *(head.norm, output, head.runner),
            factor=head.factor,
            cap=head.cap,
            streams=head.streams,
            suppressed_N=head.suppressed_N,
        )
        return cls(own, tokens.start, matrix_Vh.shape[0], reduce)

    def takes(self, rows: int) -> bool:
        """Whether all devices compute the logits of so many rows together."""
        return self.is_everywhere and rows <= MOST_ROWS and self._reduce.captures

    def logits(self, hidden_Rh: Tensor) -> Tensor:
        """Return logits [R, V]; every device of the stage calls this."""
        own = self._own(hidden_Rh)
        whole_RV = own.new_zeros(own.shape[0], self._vocab)
        whole_RV[:, self._first : self._first + own.shape[1]] = own
        return without(self._reduce(whole_RV), self._suppressed_N)
