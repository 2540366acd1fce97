import numpy as np
import torch

from modeling.sampling.noise import exponential_noise, noise_keys, splitmix64


def noise(seeds: list[int], positions: list[int], vocab_size: int) -> torch.Tensor:
    keys = noise_keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return exponential_noise(torch.from_numpy(keys), vocab_size)


def test_splitmix64_gives_the_published_sequence() -> None:
    # The first outputs of the reference splitmix64.c from state 0.
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden, 2 * golden % 2**64, 3 * golden % 2**64], np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(states).tolist() == expected


def test_noise_is_that_of_its_row_alone() -> None:
    alone = noise([7], [3], 500)
    together = noise([1, 7, 2**64 - 1], [3, 3, 0], 500)
    assert torch.equal(alone[0], together[1])
    assert torch.equal(noise([7], [3], 100)[0], alone[0, :100])


def test_noise_is_exponential() -> None:
    sample = noise(list(range(64)), [0] * 64, 4096).double().flatten().sort().values
    n = len(sample)
    expected = 1 - torch.exp(-sample)
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    # Kolmogorov-Smirnov; 1.95 / sqrt(n) is passed by chance once in a thousand.
    assert float((expected - steps).abs().max()) < 1.95 / n**0.5
    assert float(sample[0]) > 0
    assert float(sample[-1]) < float("inf")


def test_small_noise_keeps_its_precision() -> None:
    # The smallest draws decide which token wins; a generator of 24 bits would repeat itself here.
    sample = noise(list(range(256)), [0] * 256, 4096).flatten().sort().values[:1000]
    assert len(set(sample.tolist())) == 1000


def test_neighbouring_counters_are_independent() -> None:
    seeds = [0, 0, 1, 1, 2**32, 5]
    positions = [0, 1, 0, 1, 0, 2**20]
    values = noise(seeds, positions, 20000).double()
    ranks = 1 - torch.exp(-values)
    correlation = torch.corrcoef(ranks) - torch.eye(len(seeds))
    assert float(correlation.abs().max()) < 4.5 / 20000**0.5
    lagged = torch.corrcoef(torch.stack([ranks[0, :-1], ranks[0, 1:]]))[0, 1]
    assert abs(float(lagged)) < 4.5 / 20000**0.5


def test_every_output_bit_follows_every_key_bit() -> None:
    base = torch.zeros(1, 2, dtype=torch.int32)
    reference = exponential_noise(base, 2000)
    for word in range(2):
        for bit in range(32):
            flipped = base.clone()
            flipped[0, word] ^= -(2**31) if bit == 31 else 1 << bit
            changed = exponential_noise(flipped, 2000)
            pairs = torch.cat([reference, changed]).double()
            ranks = 1 - torch.exp(-pairs)
            assert abs(float(torch.corrcoef(ranks)[0, 1])) < 0.12, (word, bit)
