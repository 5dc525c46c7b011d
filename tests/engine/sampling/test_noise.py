"""The noise: uniform, independent, a function of (seed, position, entry) alone, and the same bits for
ever."""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.sampling.noise import gumbel, random_bits, row_keys, uniform

MASK64 = (1 << 64) - 1


def reference_mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def reference_mix32(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def reference_bits(seed: int, position: int, entry: int) -> int:
    """The definition in Python's unbounded integers."""
    golden = 0x9E3779B97F4A7C15
    key = reference_mix64((reference_mix64((seed + golden) & MASK64) + position * golden) & MASK64)
    x = reference_mix32((entry * 0x9E3779B1 + key) & 0xFFFFFFFF)
    return reference_mix32((x + (key >> 32)) & 0xFFFFFFFF)


def bits(seeds: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    return random_bits(
        row_keys(torch.tensor(seeds), torch.tensor(positions)), torch.arange(vocab, dtype=torch.int32)
    )


def test_bits_equal_the_definition_in_unbounded_integers():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    positions = [0, 1, 7, 8191, 131071, 3]
    got = bits(seeds, positions, 257).numpy().view(np.uint32)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [reference_bits(seed, position, entry) for entry in range(257)]
        assert got[row].tolist() == expected


def test_pinned_values_never_change():
    """A change here would make a resumed request continue with other draws than it began with."""
    got = bits([42], [100], 4).numpy().view(np.uint32)[0].tolist()
    assert got == [reference_bits(42, 100, entry) for entry in range(4)]
    assert got == PINNED


PINNED = [804287022, 1950692162, 4091215203, 450697777]


def test_a_row_does_not_depend_on_its_batch_or_on_the_width_of_the_vocabulary():
    many = bits([5, 6, 7], [10, 20, 30], 1000)
    assert torch.equal(bits([6], [20], 500)[0], many[1, :500])


def test_uniform_values_lie_strictly_inside_the_unit_interval_and_fill_it_evenly():
    values = uniform(
        row_keys(torch.arange(64), torch.arange(64) * 3), torch.arange(20_000, dtype=torch.int32)
    )
    assert float(values.min()) > 0.0
    assert float(values.max()) < 1.0
    counts = torch.histc(values, bins=100, min=0.0, max=1.0).double()
    expected = values.numel() / 100
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 55 < chi_square < 160, chi_square  # 99 degrees of freedom, p within about 1e-4 on either side


def test_neighbouring_seeds_positions_and_entries_are_uncorrelated():
    entries = torch.arange(50_000, dtype=torch.int32)
    base = uniform(row_keys(torch.tensor([7]), torch.tensor([100])), entries)[0].double()
    others = {
        "seed": uniform(row_keys(torch.tensor([8]), torch.tensor([100])), entries)[0].double(),
        "position": uniform(row_keys(torch.tensor([7]), torch.tensor([101])), entries)[0].double(),
        "entry": base.roll(1),
    }
    for name, other in others.items():
        correlation = float(torch.corrcoef(torch.stack([base, other]))[0, 1])
        assert abs(correlation) < 4.5 / 50_000**0.5, (name, correlation)


def test_every_output_bit_flips_half_the_time_when_one_input_bit_flips():
    seeds = torch.arange(4000)
    position, entry = torch.full((4000,), 17), torch.tensor([11], dtype=torch.int32)
    before = random_bits(row_keys(seeds, position), entry).numpy().view(np.uint32)
    for bit in (0, 5, 31, 40, 62):
        after = random_bits(row_keys(seeds ^ (1 << bit), position), entry).numpy().view(np.uint32)
        flips = np.unpackbits((before ^ after).view(np.uint8)).reshape(-1, 32).mean(axis=0)
        assert np.all(np.abs(flips - 0.5) < 0.04), (bit, flips)


def test_gumbel_noise_has_the_gumbel_distribution():
    values = gumbel(row_keys(torch.arange(50), torch.arange(50)), torch.arange(20_000, dtype=torch.int32))
    assert torch.isfinite(values).all()
    sample = values.flatten().double()
    assert abs(float(sample.mean()) - 0.5772156649) < 0.005  # Euler's constant
    assert abs(float(sample.var()) - np.pi**2 / 6) < 0.02
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999, 0.99999):
        share = float((sample <= -np.log(-np.log(quantile))).double().mean())
        assert abs(share - quantile) < 5 * (quantile * (1 - quantile) / sample.numel()) ** 0.5
