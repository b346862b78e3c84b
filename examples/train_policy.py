"""Train a tiny policy that imitates: camera views and state in, the next actions out. Minutes on a CPU.

    python examples/train_policy.py [DATASET] [--steps 200] [--checkpoint run.pt] [--stop-after 100] [--profile]

`make demo` makes the dataset. Needs torch: pip install 'headrace[torch]'.
"""

import argparse
from typing import Any

import torch
from torch import nn
from training import Run, parser, train

from pipeline.loaders import DeviceBatches, FrameScale, MultiViewLoader

HORIZON = 16


class TinyPolicy(nn.Module):
    """One convolutional network for all views, a mean over those that there are, and the state."""

    def __init__(self, action_dim: int, width: int = 64) -> None:
        super().__init__()
        steps = [(3, 16), (16, 32), (32, width)]
        layers = [layer for a, b in steps for layer in (nn.Conv2d(a, b, 5, stride=4, padding=2), nn.GELU())]
        self.view = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, width))
        self.head = nn.Sequential(nn.Linear(width + action_dim, 128), nn.GELU(), nn.Linear(128, HORIZON * action_dim))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return actions[b, HORIZON, action_dim]."""
        views = batch["image"]
        features = torch.stack([self.view(frames) for frames in views.values()], 1)
        there = torch.stack([batch["image_mask"][name] for name in views], 1)[..., None]
        seen = (features * there).sum(1) / there.sum(1).clamp(min=1)
        return self.head(torch.cat([seen, batch["state"]], -1)).unflatten(-1, (HORIZON, -1))


def imitation_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the squared error of the actions that the recording has."""
    error = (model(batch).float() - batch["actions"]).square().mean(dim=-1)
    return error[~batch["actions_is_pad"]].mean()


def main(options: argparse.Namespace) -> Run:
    """Train as the options say."""
    torch.manual_seed(options.seed)
    loader = MultiViewLoader(options.dataset, options.batch_size, horizon=HORIZON, seed=options.seed)
    batches = DeviceBatches(loader, options.device, frames=FrameScale(channels_first=True))
    model = TinyPolicy(loader.samples.layout["actions"][0][-1]).to(options.device)
    print(f"{sum(weights.numel() for weights in model.parameters()):,} weights, {loader.samples.num:,} samples")
    return train(model, batches, lambda batch: imitation_loss(model, batch), options)


if __name__ == "__main__":
    main(parser(__doc__, "demo/robot.zarr").parse_args())
