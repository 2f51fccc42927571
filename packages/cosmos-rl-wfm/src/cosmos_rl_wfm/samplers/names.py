"""Names that recipes use. Free of torch, so that the controller can check them."""

from __future__ import annotations

from typing import Literal

RuleName = Literal["flow_sde", "dance_sde", "cps", "ode"]
"""How one denoising step is taken: `steps.step`."""
ScheduleName = Literal["flow", "flow_match_euler", "edm"]
"""Where the times of a rollout lie: `times.flow_times`, `times.flow_match_euler_times`, `times.edm_times`."""
DensityName = Literal["uniform", "logit_normal"]
"""How times are drawn in training: `times.draw_times`."""
WindowName = Literal["all", "fixed", "random_window", "random_subset", "sliding"]
"""Which steps are stochastic, and which are trained: `window.Window`."""
