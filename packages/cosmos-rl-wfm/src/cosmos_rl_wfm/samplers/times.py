"""Times of a rollout, from noise (1) to clean (0), and times to train at.

x_t = (1 - t) x_0 + t noise           sigma = t / (1 - t), the noise level in EDM's coordinates x_t / (1 - t)
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_rl_wfm.samplers import DensityName


def shifted(times: Tensor, *, shift: float) -> Tensor:
    """Move times in [0, 1] towards noise: shift t / (1 + (shift - 1) t). SD3 (arXiv 2403.03206, eq. 23).

    1 changes nothing; long videos and high resolutions need 3 to 5. The ends 0 and 1 stay.
    """
    if shift <= 0:
        raise ValueError(f"the shift of times must be above 0, not {shift}")
    return shift * times / (1 + (shift - 1) * times)


def flow_times(num_steps: int, *, shift: float = 1.0) -> Tensor:
    """Return [num_steps + 1] float32 times from 1 to 0, equally spaced before the shift."""
    _check(num_steps)
    return _pinned(shifted(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift=shift), first=1.0)


def flow_match_euler_times(num_steps: int, *, shift: float = 1.0, train_steps: int = 1000) -> Tensor:
    """Return [num_steps + 1] float32 times of diffusers' FlowMatchEulerDiscreteScheduler with a fixed shift.

    linspace(1, s(1 / train_steps), num_steps), shifted by s, and 0 at the end: the last but one time is shifted twice.
    SD3's pipeline and flow_grpo use these. The last step is short, and the others are longer than those of
    `flow_times`.
    """
    _check(num_steps)
    least = shifted(torch.tensor(1 / train_steps, dtype=torch.float64), shift=shift).item()
    times = shifted(torch.linspace(1, least, num_steps, dtype=torch.float64), shift=shift)
    return _pinned(torch.cat([times, times.new_zeros(1)]), first=1.0)


def edm_times(num_steps: int, *, sigma_max: float = 200.0, sigma_min: float = 0.01, rho: float = 7.0) -> Tensor:
    """Return [num_steps + 1] float32 times of EDM's noise levels, t = sigma / (1 + sigma), and 0 at the end.

    sigma_i = (sigma_max^(1/rho) + i / (num_steps - 1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho
    (arXiv 2206.00364, eq. 5), with the values of Cosmos-Predict. The first time is below 1.
    """
    _check(num_steps)
    if not 0 < sigma_min < sigma_max:
        raise ValueError(f"sigma_min = {sigma_min} must be between 0 and sigma_max = {sigma_max}")
    most, least = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    sigmas = torch.linspace(most, least, num_steps, dtype=torch.float64) ** rho
    times = torch.cat([sigmas / (1 + sigmas), sigmas.new_zeros(1)])
    return _pinned(times, first=sigma_max / (1 + sigma_max))


def sample_times(
    count: int,
    *,
    generator: torch.Generator,
    density: DensityName = "uniform",
    shift: float = 1.0,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Sample [count] float32 times to train at, in [0, 1], on the generator's device.

    logit_normal is sigmoid(mean + std noise) (arXiv 2403.03206, section 3.1); the shift is applied after sampling.
    """
    options = {"generator": generator, "dtype": torch.float64, "device": generator.device}
    if density == "uniform":
        times = torch.rand(count, **options)
    elif density == "logit_normal":
        times = torch.sigmoid(mean + std * torch.randn(count, **options))
    else:
        raise ValueError(f"unknown density of times {density!r}; there are 'uniform' and 'logit_normal'")
    return shifted(times, shift=shift).float()


def _check(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"a rollout takes 1 denoising step or more, not {num_steps}")


def _pinned(times: Tensor, *, first: float) -> Tensor:
    """Float32 with exact ends: rules compare a time with 1, and the last state must be clean."""
    times[0], times[-1] = first, 0.0
    return times.float()
