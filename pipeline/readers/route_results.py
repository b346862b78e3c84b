"""Which driven routes are worth learning from, by the results that CARLA's leaderboard writes at a route's end."""

from collections.abc import Mapping
from typing import Any

from schemas.errors import SourceError

RULES = ("all", "perfect", "min-speed", "lead")
"""``perfect``: no infraction at all (TransFuser++ on leaderboard 1). ``min-speed``: driving too slowly is forgiven (leaderboard 2,
SimLingo). ``lead``: so is leaving the route's lanes, if the route was completed (LEAD)."""

FORGIVEN = {
    "perfect": frozenset[str](),
    "min-speed": frozenset({"min_speed_infractions"}),
    "lead": frozenset({"min_speed_infractions", "outside_route_lanes"}),
}


def refusal(results: Mapping[str, Any], rule: str) -> str:
    """Return why a route with these results is left out under ``rule``, or an empty string.

    A route is kept whose composed score is 100, or lower only through infractions that the rule forgives; one that failed never is.

    Raises
    ------
    SourceError
        Where the results have no status or no score.
    """
    if rule == "all":
        return ""
    status, score = results.get("status"), _score(results)
    if not isinstance(status, str) or score is None:
        raise SourceError("expected status and composed score in the results, found none; drive the route again")
    if status.startswith("Failed"):
        return status
    if score >= 100.0:
        return ""
    infractions = results.get("infractions")
    committed = {name for name, events in infractions.items() if events} if isinstance(infractions, dict) else set()
    is_complete = status.startswith(("Completed", "Perfect"))
    forgiven = FORGIVEN[rule] if is_complete or rule != "lead" else FORGIVEN["min-speed"]
    if committed and committed <= forgiven:
        return ""
    return f"score {score:g}, {', '.join(sorted(committed - forgiven)) or 'no infraction named'}"


def _score(results: Mapping[str, Any]) -> float | None:
    scores = results.get("scores")
    score = scores.get("score_composed") if isinstance(scores, dict) else None
    return float(score) if isinstance(score, int | float) and abs(score) < 1e9 else None
