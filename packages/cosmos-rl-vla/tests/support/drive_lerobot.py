"""Drives the simulator `reach` as a robot of lerobot, with its robot client, in an interpreter that has it.

python drive_lerobot.py PORT NAME_OF_THE_POLICY
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from lerobot.async_inference.configs import RobotClientConfig
from lerobot.async_inference.robot_client import RobotClient
from lerobot.robots import Robot, RobotConfig

from cosmos_rl_vla.sims.reach import Reach

ACTIONS = 20
AXES = ("x.pos", "y.pos")


@RobotConfig.register_subclass("reach")
@dataclass
class ReachRobotConfig(RobotConfig):
    size: int = 64


class ReachRobot(Robot):
    config_class = ReachRobotConfig
    name = "reach"
    is_connected = False
    is_calibrated = True

    def __init__(self, config: ReachRobotConfig) -> None:
        super().__init__(config)
        self.size, self.simulator = config.size, Reach(image_size=config.size, max_steps=10_000)
        self.executed: list[np.ndarray] = []
        self.done = threading.Event()

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        return {**dict.fromkeys(AXES, float), "board": (self.size, self.size, 3)}

    @cached_property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(AXES, float)

    def connect(self, calibrate: bool = True) -> None:
        self.simulator.reset("red", 0)
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False

    def calibrate(self) -> None:
        pass

    def configure(self) -> None:
        pass

    def get_observation(self) -> dict[str, Any]:
        seen = self.simulator.observe()
        return {**dict(zip(AXES, map(float, seen.state), strict=True)), "board": seen.images["board"]}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.simulator.step(np.array([action[axis] for axis in AXES], np.float32))
        self.executed.append(self.simulator.observe().state)
        if len(self.executed) >= ACTIONS:
            self.done.set()
        return action


def main() -> None:
    port, policy = sys.argv[1:]
    config = RobotClientConfig(
        policy_type="pi05",
        pretrained_name_or_path=policy,
        robot=ReachRobotConfig(),
        actions_per_chunk=4,
        task="reach the red square",
        server_address=f"127.0.0.1:{port}",
        aggregate_fn_name="latest_only",
        fps=10,
    )
    client = RobotClient(config)
    assert client.start()
    robot = client.robot
    threads = [
        threading.Thread(target=client.receive_actions, daemon=True),
        threading.Thread(target=client.control_loop, kwargs={"task": config.task}, daemon=True),
    ]
    for thread in threads:
        thread.start()
    finished = robot.done.wait(600)
    client.stop()
    moved = bool(robot.executed) and float(np.ptp(robot.executed, axis=0).max()) > 1e-3
    print(json.dumps({"executed": len(robot.executed), "finished": finished, "moved": moved}))


if __name__ == "__main__":
    main()
