"""What a running conversion tells whoever watches it."""

from pipeline.plan import Estimate, Plan


class Watch:
    """Sees a conversion happen; the command line shows a progress bar with it. Every method may be left as it is."""

    def planned(self, plan: Plan, cost: Estimate, reused: int) -> None:
        """Take the plan, before anything runs."""

    def advanced(self, done_steps: int, total_steps: int, frames: int) -> None:
        """Take the progress."""

    def said(self, text: str) -> None:
        """Take one line of what is going on."""
