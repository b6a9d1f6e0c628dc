"""What `import twinstream` offers, with all that it takes."""

from twinstream.api import Run, execute, from_blocks, plan, simulate, write_report
from twinstream.clusters.conforms import conforms
from twinstream.clusters.predict import Prediction, planned_document, predict
from twinstream.clusters.search.found import RankedLayout, SearchResult
from twinstream.clusters.search.search import search_layouts
from twinstream.clusters.search.space import RunsHere
from twinstream.cost.bill import Bill
from twinstream.cost.devices import cost_devices
from twinstream.cost.time import RunTime
from twinstream.cost.work import RunWork
from twinstream.frames import HasRecords, figure, frame
from twinstream.hardware_profiles.clusters.loader import cluster_names, load_cluster
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.schema import Machine
from twinstream.log.metrics import CheckpointMetrics, EvalMetrics, StepMetrics
from twinstream.measures.explanation import Explanation, explain
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.loss import Dpo
from twinstream.models.options import Experts
from twinstream.models.presets import load_model, preset_names
from twinstream.models.providers.model import Model
from twinstream.models.providers.traced import TracedModel
from twinstream.models.providers.trained import frozen_groups
from twinstream.models.recipes.lora import Lora, lora_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.planner.choices import Choices
from twinstream.planner.evaluator import Evaluator, SimResult
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.limits import SearchLimits
from twinstream.planner.planner import Planner
from twinstream.planner.policies import Policy
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.run_settings import RunSettings
from twinstream.schedule.analysis.comparison import Comparison, compare
from twinstream.schedule.chain import Chain
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.violations import Violation
from twinstream.schedule.timeline import RankTimeline, Timeline
from twinstream.schedule.workload import Packing
from twinstream.simulator.replay import SteadyState, steady_state
from twinstream.study.answer import Answer
from twinstream.study.fit.cells import FitCell, FitQuestion, FitTable, OwnLengths, fit
from twinstream.study.front import cost_of_run, cost_time, cost_work, explore, query, sweep
from twinstream.study.query import Property, Query
from twinstream.study.sweep.sweep import Swept
from twinstream.study.whatif.target import TargetFound, search_target
from twinstream.study.whatif.whatif import Change, WhatIf, usual_changes, whatif
from twinstream.tracing import find_model, trace_model
from twinstream.training.callbacks import Callback
from twinstream.training.options import TrainOptions
from twinstream.training.preparing import Prepared
from twinstream.training.run.run_folder import TrainResult
from twinstream.training.scoring import Score, logits, score
from twinstream.training.trainer import Trainer, train

__all__ = [
    "Answer",
    "Bill",
    "Callback",
    "Caps",
    "Chain",
    "Change",
    "CheckpointMetrics",
    "Choices",
    "Cluster",
    "Comparison",
    "Dpo",
    "EvalMetrics",
    "Evaluator",
    "Experts",
    "Explanation",
    "FitCell",
    "FitQuestion",
    "FitTable",
    "HasRecords",
    "InfeasiblePlan",
    "Job",
    "KernelChoice",
    "Layout",
    "Lora",
    "Machine",
    "Model",
    "ModelSpec",
    "OwnLengths",
    "Packing",
    "PlanRequest",
    "Planner",
    "Policy",
    "Prediction",
    "Prepared",
    "Property",
    "Query",
    "RankSchedule",
    "RankTimeline",
    "RankedLayout",
    "Recipe",
    "Run",
    "RunSettings",
    "RunTime",
    "RunWork",
    "RunsHere",
    "Schedule",
    "Score",
    "SearchLimits",
    "SearchResult",
    "Shortage",
    "SimResult",
    "SteadyState",
    "StepMetrics",
    "Summary",
    "Swept",
    "TargetFound",
    "Timeline",
    "TracedModel",
    "TrainOptions",
    "TrainResult",
    "Trainer",
    "TrainingStep",
    "TwinstreamError",
    "Violation",
    "WhatIf",
    "cluster_names",
    "compare",
    "conforms",
    "cost_devices",
    "cost_of_run",
    "cost_time",
    "cost_work",
    "execute",
    "explain",
    "explore",
    "figure",
    "find_model",
    "fit",
    "frame",
    "from_blocks",
    "frozen_groups",
    "load_cluster",
    "load_machine",
    "load_model",
    "logits",
    "lora_of",
    "machine_names",
    "plan",
    "planned_document",
    "predict",
    "preset_names",
    "query",
    "score",
    "search_layouts",
    "search_target",
    "simulate",
    "steady_state",
    "summarize",
    "sweep",
    "trace_model",
    "train",
    "usual_changes",
    "verify",
    "whatif",
    "write_report",
]
