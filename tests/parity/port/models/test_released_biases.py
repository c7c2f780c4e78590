"""Biases that released models add to scores by position: our layers of the same specification
agree.
"""

import numpy as np
import pytest
import torch
from helpers.released import check_equal
from helpers.released_layers.biases import LAYERS
from helpers.samples import sample
from transformers.models.t5 import modeling_t5

from mha_spec import RelativeBias


@sample(name=["T5, decoder"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_the_released_one(name):
    """Output, gradients and, if causal, cached steps equal the released layer's."""
    check_equal(LAYERS[name](), is_causal=name != "T5, encoder")


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_match_t5_at_all_distances(bidirectional):
    """Buckets equal T5's, and differ by at most 1 where a bucket begins within rounding of a
    distance: there torch depends on the processor's logarithm. T5's own size is always equal.
    """
    bucket = modeling_t5.T5Attention._relative_position_bucket
    for num_buckets in (4, 6, 8, 32, 34, 38, 64, *(() if bidirectional else (2, 3, 17, 19))):
        count = num_buckets // 2 if bidirectional else num_buckets
        num_exact = count // 2
        for max_distance in (num_exact + 1, 25, 27, 49, 98, 128, 1000):
            if max_distance <= num_exact:
                continue
            actual = RelativeBias(num_buckets, max_distance, bidirectional).buckets()
            distances = torch.arange(-3 * max_distance, 3 * max_distance + 1)
            expected = bucket(distances, bidirectional, num_buckets, max_distance).numpy()
            actual = actual[distances.clamp(-max_distance, max_distance) + max_distance]
            steps = np.log(np.maximum(np.abs(distances.numpy()), num_exact) / num_exact)
            steps *= (count - num_exact) / np.log(max_distance / num_exact)
            is_decided = (np.abs(steps - np.round(steps)) > 1e-5) | (
                np.abs(distances.numpy()) <= num_exact
            )
            is_decided |= (num_buckets, max_distance) == (32, 128)  # as T5 is released
            assert is_decided.mean() > 0.5
            assert (actual == expected)[is_decided].all(), (num_buckets, max_distance)
            assert (np.abs(actual - expected) <= 1).all(), (num_buckets, max_distance)
