"""An independent judge of prompts: which shape does a clip show, and in which direction does it move?

A small video classifier, trained on the dataset's own clips. It is never a reward: what the policy is not paid for
cannot be gamed, so a judge that falls while the reward rises says that the reward is being hacked.

python cookbook/wfm_quickstart/judge.py DIR          after clips.py; writes DIR/judge.safetensors
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from clips import CAPTIONS, SHAPES, read_clips
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cosmos_rl_core import RolloutGroup
from cosmos_rl_wfm import DIRECTIONS

HELD_OUT = 0.1
"""Fraction of the clips, the last ones, held out from training."""


class Judge(nn.Module):
    """Three convolutions in space and time, the maximum over each frame, the mean over frames, two classifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(1, 16, 3, stride=(1, 2, 2), padding=1),
            nn.ReLU(),
            nn.Conv3d(16, 32, 3, stride=(2, 2, 2), padding=1),
            nn.ReLU(),
            nn.Conv3d(32, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.shape, self.towards = nn.Linear(64, len(SHAPES)), nn.Linear(64, len(DIRECTIONS))

    def forward(self, brightness: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of shapes [B, 3] and of directions [B, 4], for brightness [B, F, H, W] in [0, 1]."""
        features = self.features(brightness[:, None] * 2 - 1).amax((3, 4)).mean(2)
        return self.shape(features), self.towards(features)


@torch.no_grad()
def answers(judge: Judge, videos: np.ndarray, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return whether shape and whether direction are the caption's, bool [B] each, for uint8 [B, F, H, W, 3]."""
    logits, (shape, towards) = judge(_brightness(videos)), _labels(captions)
    return logits[0].argmax(1) == shape, logits[1].argmax(1) == towards


def prompt_ok(judge: Judge, videos: np.ndarray, captions: Sequence[str]) -> float:
    """Return the fraction of clips that match their captions. Chance is 1/12."""
    shape, towards = answers(judge, videos, captions)
    return (shape & towards).float().mean().item()


def train_judge(videos: np.ndarray, captions: Sequence[str], *, steps: int = 500, seed: int = 0) -> Judge:
    """Train on uint8 [N, F, H, W, 3]. Some noise is added, since generated clips are not as clean as real ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        judge = Judge()
    generator = torch.Generator().manual_seed(seed)
    brightness, (shape, towards) = _brightness(videos), _labels(captions)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(brightness), (64,), generator=generator)
        noise = torch.randn(64, *brightness.shape[1:], generator=generator)
        level = 0.1 * torch.rand(64, 1, 1, 1, generator=generator)
        of_shape, of_towards = judge((brightness[rows] + level * noise).clamp(0, 1))
        loss = nn.functional.cross_entropy(of_shape, shape[rows])
        loss = loss + nn.functional.cross_entropy(of_towards, towards[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return judge.eval()


def load_judge(path: Path) -> Judge:
    """Read the weights that `main` wrote."""
    judge = Judge()
    judge.load_state_dict(load_file(path))
    return judge.eval()


class PromptOk:
    """The judge as a reward, for recipes and servers: "judge:PromptOk", with the `path` of its weights."""

    def __init__(self, *, path: str) -> None:
        self.judge = load_judge(Path(path))

    def __call__(self, group: RolloutGroup) -> list[float]:
        """Return 1 for each rollout that matches its caption, otherwise 0."""
        videos = np.stack([rollout.media["video"] for rollout in group.rollouts])
        shape, towards = answers(self.judge, videos, [group.prompt.row["caption"]] * len(videos))
        return (shape & towards).float().tolist()


def _brightness(videos: np.ndarray) -> Tensor:
    return torch.from_numpy(videos.mean(-1, dtype=np.float32) / 255)


def _labels(captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    places = torch.tensor([CAPTIONS.index(caption) for caption in captions])
    return places // len(DIRECTIONS), places % len(DIRECTIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    videos, captions = read_clips(arguments.directory)
    seen = len(videos) - int(HELD_OUT * len(videos))
    judge = train_judge(videos[:seen], captions[:seen], seed=arguments.seed)
    save_file(judge.state_dict(), arguments.directory / "judge.safetensors")
    shape, towards = answers(judge, videos[seen:], captions[seen:])
    print(f"held out {len(shape)} clips: shape {shape.float().mean():.3f}, direction {towards.float().mean():.3f}")


if __name__ == "__main__":
    main()
