"""The oracle: what a variant means, read from the user's own source and computed pair by pair.

    attend(Leaf(source), q, k, v, {"slopes": slopes})   ->   out, lse

It is a second, independent reading: it walks Python's syntax tree, or the mini-language's, and
evaluates with torch in float64 and int64. It shares the grammar and the finding of sources with
the compiler and nothing else. It is written for reading: values and their operations first, then
captures, the two walkers, composition, and attention itself.
"""

from .attention import attend, mask_dense, scores_dense

__all__ = ["attend", "mask_dense", "scores_dense"]
