"""Which source view serves which target view, and which columns make which signal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import PlanError, UsageError
from schemas.recipe import Recipe
from schemas.source import EpisodeRef, SignalInfo, SourceIndex


@dataclass(frozen=True, slots=True)
class Bindings:
    """What a recipe means for given sources; frozen with the first generation, so that later episodes are read alike."""

    views: dict[str, tuple[str, ...]]
    """``target -> source views``, best first; the first one that an episode has serves it."""
    signals: dict[str, tuple[str, ...]]
    """``signal -> columns``."""
    sizes: dict[str, int]
    """``signal -> number of features``."""
    tensors: tuple[SignalInfo, ...] = ()
    """Arrays of samples that the sources hold ready-made; empty where samples are computed, or there are none."""

    def view(self, ref: EpisodeRef, target: str) -> str:
        """Return the source view that serves ``target`` in this episode, or an empty string."""
        present = {view.name for view in ref.views if view.present}
        return next((name for name in self.views[target] if name in present), "")


def bind(recipe: Recipe, indexes: Sequence[SourceIndex]) -> Bindings:
    """Bind views and signals of ``recipe`` to what the sources offer.

    A target view takes those of its candidates that a source declares; one without any takes the first declared view, in the
    source's order, that nothing else uses: those with frames before those that no episode has yet.
    UsageError where a view or column that was asked for by name is not there.
    """
    episodes = [episode for index in indexes for episode in index.episodes]
    signals = {signal.name: signal.columns or _default_columns(signal.name, indexes) for signal in recipe.signals}
    signals = {name: columns for name, columns in signals.items() if columns}
    sizes = {name: _size(name, columns, episodes) for name, columns in signals.items()}
    _check_rotations(recipe, signals, episodes)
    return Bindings(_bind_views(recipe, episodes), signals, sizes, _bind_tensors(recipe, indexes))


def _check_rotations(recipe: Recipe, signals: Mapping[str, tuple[str, ...]], episodes: Sequence[EpisodeRef]) -> None:
    """Raise UsageError where slerp is asked for of columns that are no quaternions."""
    sizes = {signal.name: signal.size for episode in episodes for signal in episode.signals}
    for signal in recipe.signals:
        for place, column in enumerate(signals.get(signal.name, ())):
            if signal.method(place) == "slerp" and sizes[column] % 4:
                raise UsageError(
                    f"expected quaternions of 4 values in {column!r} for slerp, found {sizes[column]} values; give each column its own "
                    f'way, [signals.{signal.name}] align = ["linear", "slerp"]'
                )


def _bind_tensors(recipe: Recipe, indexes: Sequence[SourceIndex]) -> tuple[SignalInfo, ...]:
    """Return the samples that all sources hold alike."""
    answers = list(dict.fromkeys(index.tensors for index in indexes if index.episodes))
    if not any(answers):
        return ()
    if len(answers) > 1:
        raise PlanError(
            "expected sources whose samples are alike, found others; convert each into a dataset of its own"
        )
    if recipe.planner is None or recipe.planner.normalize != "none" or recipe.rate_hz:
        raise UsageError(
            f"expected a recipe that keeps samples as they are, found {recipe.name!r}; use --recipe planner-npz"
        )
    return answers[0]


def _bind_views(recipe: Recipe, episodes: Sequence[EpisodeRef]) -> dict[str, tuple[str, ...]]:
    declared = dict.fromkeys(view.name for episode in episodes for view in episode.views)
    offered = [view for episode in episodes for view in episode.views if view.kind == "rgb"]
    present = {view.name for view in offered if view.present}
    free = sorted(dict.fromkeys(view.name for view in offered), key=lambda name: name not in present)
    bound: dict[str, tuple[str, ...]] = {}
    for view in recipe.views:
        found = tuple(name for name in view.candidates if name in declared)
        if not found and len(view.candidates) == 1:
            raise UsageError(
                f"expected one of the views {', '.join(declared) or '(none)'} for {view.name!r}, found {view.candidates[0]!r}; "
                "correct --view or the recipe's `from`"
            )
        bound[view.name] = found
    used = {name for names in bound.values() for name in names}
    left = iter([name for name in free if name not in used])
    return {target: names or tuple(name for name in [next(left, "")] if name) for target, names in bound.items()}


def _default_columns(signal: str, indexes: Sequence[SourceIndex]) -> tuple[str, ...]:
    """Return the formats' own columns for ``state`` or ``actions``; all sources must agree."""
    answers = {getattr(index, signal, ()) for index in indexes if index.episodes}
    if len(answers) > 1:
        raise PlanError(
            f"expected sources that agree on the columns of {signal!r}, found {sorted(answers)}; "
            f"name them in the recipe, [signals.{signal}] from = [...]"
        )
    return answers.pop() if answers else ()


def _size(name: str, columns: tuple[str, ...], episodes: Sequence[EpisodeRef]) -> int:
    for episode in episodes:
        offered = {signal.name: signal.size for signal in episode.signals}
        if all(column in offered for column in columns):
            return sum(offered[column] for column in columns)
    first = [signal.name for signal in episodes[0].signals] if episodes else []
    raise UsageError(
        f"expected the columns {list(columns)} for {name!r}, found {first}; name existing ones in the recipe, [signals.{name}] from"
    )
