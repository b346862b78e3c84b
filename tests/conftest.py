"""What every test may ask for: the real recordings, and how thorough hypothesis is."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parents[1]

# Few and always the same examples where every change waits for them; `make soak` looks for new ones.
_patient = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", max_examples=30, derandomize=True, deadline=None, suppress_health_check=_patient)
settings.register_profile("soak", max_examples=1000, deadline=None, suppress_health_check=_patient, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def shared_data(*parts: str) -> Path:
    """Return the folder of real recordings, or ``parts`` below it; skip the test where it is absent.

    It lies beside the repository in ``../shared/data``, or where ``HEADRACE_SHARED_DATA`` says.
    """
    root = Path(os.environ.get("HEADRACE_SHARED_DATA") or REPOSITORY.parent / "shared" / "data")
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(
            f"needs the real recordings: {Path(root.name, *parts)} is absent; HEADRACE_SHARED_DATA names another place"
        )
    return path


@pytest.fixture(name="shared_data", scope="session")
def _shared_data() -> Path:
    return shared_data()


@pytest.fixture(autouse=True)
def _no_surprises_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own Dask and terminal settings out of the tests."""
    for name in [name for name in os.environ if name.startswith(("DASK_", "HEADRACE_"))]:
        if name != "HEADRACE_SHARED_DATA":
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
