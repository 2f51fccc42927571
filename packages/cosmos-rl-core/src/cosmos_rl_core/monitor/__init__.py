"""The hack monitor: a few figures of a run in, warnings, rollbacks and stops out."""

from cosmos_rl_core.monitor.config import DEFAULT_RULES, MonitorConfig, Rule
from cosmos_rl_core.monitor.metrics import Figures, beyond
from cosmos_rl_core.monitor.monitor import Alarm, HackMonitor, State, Verdict, look

__all__ = [
    "DEFAULT_RULES",
    "Alarm",
    "Figures",
    "HackMonitor",
    "MonitorConfig",
    "Rule",
    "State",
    "Verdict",
    "beyond",
    "look",
]
