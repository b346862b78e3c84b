"""Train a tiny Diffusion Planner on a planner dataset: minutes on a CPU.

    python examples/train_planner.py [DATASET] [--steps 200] [--checkpoint run.pt] [--stop-after 100] [--profile]

The layout of the real one (https://github.com/ZhengYinan-AIR/Diffusion-Planner), small: every road user's future is one token of a transformer whose layers
are modulated by the diffusion time (DiT) and look at tokens of neighbours, lanes and route; it is trained to give back the clean futures (x_start) from
noisy ones of a variance-preserving diffusion. `make demo` makes the dataset. Needs torch: pip install 'headrace[torch]'.
"""

import argparse
from typing import Any

import torch
from torch import nn
from training import Run, parser, train

from pipeline.loaders import DeviceBatches, PlannerLoader

MEAN, STD = (10.0, 0.0, 0.0, 0.0), (20.0, 20.0, 1.0, 1.0)
"""Diffusion Planner's constants of futures: x, y in metres, cosine and sine of the heading."""
BETA = (0.1, 20.0)
"""Its noise schedule, from the first moment to the last."""


class Block(nn.Module):
    """A DiT layer: attention among road users and to the scene, scaled and shifted by the diffusion time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 4 * width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.own = nn.MultiheadAttention(width, 4, batch_first=True)
        self.scene = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, time: torch.Tensor, scene: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return x[b, agent, width] after the layer; ``hidden``: bool[b, token] of the scene's empty tokens."""
        shift, scale, shift_mlp, scale_mlp = self.modulation(time)[:, None].chunk(4, dim=-1)
        y = self.norms[0](x) * (1 + scale) + shift
        x = x + self.own(y, y, y, need_weights=False)[0]
        x = x + self.scene(self.norms[1](x), scene, scene, key_padding_mask=hidden, need_weights=False)[0]
        return x + self.mlp(self.norms[2](x) * (1 + scale_mlp) + shift_mlp)


class TinyPlanner(nn.Module):
    """Clean futures from noisy ones: x[b, agent, 1 + future, 4], agent 0 the ego, step 0 the present."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], num_agents: int, future_len: int, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(shape[1] * shape[2], width), nn.GELU(), nn.Linear(width, width))
                for name, shape in shapes.items()
            }
        )
        self.ego = nn.Linear(4, width)
        self.future = nn.Linear((1 + future_len) * 4, width)
        self.agents = nn.Parameter(0.02 * torch.randn(num_agents, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.out = nn.Linear(width, (1 + future_len) * 4)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """Return the clean futures, in the shape of ``noisy``."""
        scene = [self.ego(batch["ego_current_state"][:, None, :4])]
        hidden = [torch.zeros(scene[0].shape[:2], dtype=torch.bool, device=noisy.device)]
        for name, layers in self.tokens.items():
            rows = batch[name].flatten(2)
            scene.append(layers(rows))
            hidden.append((rows == 0).all(dim=-1))  # a row of zeros is nobody
        x = self.future(noisy.flatten(2)) + self.agents
        condition = self.time(time[:, None])
        for block in self.blocks:
            x = block(x, condition, torch.cat(scene, 1), torch.cat(hidden, 1))
        return self.out(x).view_as(noisy)


def targets(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised futures float32[b, agent, 1 + future, 4], present first, and bool[b, agent, 1 + future] where they are known."""
    ego, others = batch["ego_agent_future"], batch["neighbor_agents_future"]
    futures = torch.cat([ego[:, None], others], 1)
    known = (futures != 0).any(dim=-1)
    known[:, 0] = True
    heading = futures[..., 2:]
    rows = torch.cat([futures[..., :2], heading.cos(), heading.sin()], -1)
    scaled = (rows - rows.new_tensor(MEAN)) / rows.new_tensor(STD)
    present = torch.cat(
        [batch["ego_current_state"][:, None, :4], batch["neighbor_agents_past"][:, : others.shape[1], -1, :4]], 1
    )
    return torch.cat([present[:, :, None], scaled * known[..., None]], 2), nn.functional.pad(known, (1, 0), value=False)


def diffusion_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the error of the clean futures where they are known, at random diffusion times; the present stays without noise."""
    clean, known = targets(batch)
    time = torch.rand(len(clean)).to(clean.device) * (1 - 1e-3) + 1e-3
    log_mean = -0.25 * time**2 * (BETA[1] - BETA[0]) - 0.5 * time * BETA[0]
    mean, std = log_mean.exp(), (1 - (2 * log_mean).exp()).sqrt()
    noise = torch.randn(clean.shape).to(clean.device)
    noisy = mean[:, None, None, None] * clean + std[:, None, None, None] * noise
    noisy[:, :, 0] = clean[:, :, 0]
    error = (model(noisy, time, batch).float() - clean).square().mean(dim=-1)
    return error[known].mean()


def main(options: argparse.Namespace) -> Run:
    """Train as the options say."""
    torch.manual_seed(options.seed)
    loader = PlannerLoader(options.dataset, options.batch_size, seed=options.seed)
    layout = {name: shape for name, (shape, _) in loader.samples.layout.items()}
    tokens = {name: layout[name] for name in ("neighbor_agents_past", "lanes", "route_lanes")}
    neighbors, future_len, _ = layout["neighbor_agents_future"]
    model = TinyPlanner(tokens, 1 + neighbors, future_len).to(options.device)
    print(f"{sum(weights.numel() for weights in model.parameters()):,} weights, {loader.samples.num:,} samples")
    return train(model, DeviceBatches(loader, options.device), lambda batch: diffusion_loss(model, batch), options)


if __name__ == "__main__":
    main(parser(__doc__, "demo/planner.zarr").parse_args())
