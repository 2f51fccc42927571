"""The reward-hacking monitor: takes metrics of a run, returns warnings, rollbacks and stops.

Used by `recipe`, `workers` and `launch`; imports `settings`, `observe.sinks` and core's types.
"""

from cosmos_rl_core.monitor.config import DEFAULT_RULES, MonitorConfig, Rule
from cosmos_rl_core.monitor.monitor import CheckMetrics, HackMonitor, MonitorAlarm, State, Verdict, beyond, check

__all__ = [
    "DEFAULT_RULES",
    "MonitorAlarm",
    "CheckMetrics",
    "HackMonitor",
    "MonitorConfig",
    "Rule",
    "State",
    "Verdict",
    "beyond",
    "check",
]
