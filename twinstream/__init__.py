"""Plan, simulate and execute GPU training steps under memory limits, from one schedule."""

from twinstream.api import Run, RunSettings, execute, plan, simulate
from twinstream.hardware_profiles.loader import load_machine
from twinstream.metrics import Summary, summarize
from twinstream.models.presets import load_model
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.chunking import TrainingStep
from twinstream.schedule.comparison import Comparison, compare
from twinstream.schedule.conforms import conforms
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.verify import verify

__all__ = [
    "Caps",
    "Comparison",
    "ModelSpec",
    "Recipe",
    "Run",
    "RunSettings",
    "Schedule",
    "Summary",
    "Timeline",
    "TrainingStep",
    "TwinstreamError",
    "compare",
    "conforms",
    "execute",
    "load_machine",
    "load_model",
    "plan",
    "simulate",
    "summarize",
    "verify",
]
