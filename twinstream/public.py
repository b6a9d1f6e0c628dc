"""What `import twinstream` offers, with all that it takes."""

from twinstream.api import Run, RunSettings, execute, plan, simulate, write_report
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import Explanation, explain
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.policies_compared import PoliciesCompared, compare_policies
from twinstream.models.presets import load_model
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.search.chunking import TrainingStep
from twinstream.schedule.analysis.comparison import Comparison, compare
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify
from twinstream.schedule.timeline import Timeline

__all__ = [
    "Caps",
    "Comparison",
    "Explanation",
    "Machine",
    "ModelSpec",
    "PoliciesCompared",
    "Recipe",
    "Run",
    "RunSettings",
    "Schedule",
    "Summary",
    "Timeline",
    "TrainingStep",
    "TwinstreamError",
    "compare",
    "compare_policies",
    "conforms",
    "execute",
    "explain",
    "load_machine",
    "load_model",
    "plan",
    "simulate",
    "summarize",
    "verify",
    "write_report",
]
