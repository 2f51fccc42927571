"""Samplers: schedules of times, choice of stochastic steps, update rules, noise and guidance.

Here are the names that recipes use, without torch: the controller checks them.
"""

from __future__ import annotations

from typing import Literal

RuleName = Literal["flow_sde", "dance_sde", "cps", "ode"]
"""Update rule of a denoising step: `steps.step`."""
ScheduleName = Literal["flow", "flow_match_euler", "edm"]
"""Schedule of the times of a rollout: `times.flow_times`, `times.flow_match_euler_times`, `times.edm_times`."""
DensityName = Literal["uniform", "logit_normal"]
"""Density of the times sampled in training: `times.sample_times`."""
WindowName = Literal["all", "fixed", "random_window", "random_subset", "sliding"]
"""Choice of the stochastic and the trained steps: `window.WindowSection`."""
