"""Factorization machine: the sum of the products of all pairs of vectors."""

from torch import Tensor


def factorization_machine(vectors: Tensor) -> Tensor:
    """Map vectors [B, F, D] to the sum of the dot products of all pairs, [B] in float32.

    sum_{i<j} <v_i, v_j> = 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2) (Rendle 2010, 10.1109/ICDM.2010.127, lemma 3.1). The
    difference is taken in float32, since it cancels most digits of 16-bit numbers.
    """
    vectors = vectors.float()
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
