"""Plans and predictions for what the explorer is asked; the last few are kept."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, get_args

from twinstream import api
from twinstream.explorer.state import State, StateError, count_of
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import Explanation, explain
from twinstream.measures.metrics import Summary, summarize
from twinstream.models.freezing import trained_of
from twinstream.models.presets import executable_presets, load_model
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.kernel_choice import kernels_named
from twinstream.planner.planner import Planner, gc_paused
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest, TrainingStep
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import steady_state

_MOST_KEPT = 48
OPTIMIZER_STATES: tuple[str, ...] = get_args(Recipe.model_fields["optimizer_state"].annotation)


@dataclass(frozen=True)
class Answer:
    """A plan on one machine, and what it yields."""

    machine: Machine
    schedule: Schedule
    timeline: Timeline
    summary: Summary
    explanation: Explanation


Asked = tuple[State, str]  # and the machine


class Answers:
    """Answers by state and machine. Models and machines are those offered, by name.

    A new page begins with those that were given, the first model and all machines.
    """

    def __init__(self, model_files: Mapping[str, str], machine_files: Mapping[str, str]) -> None:
        self.model_files, self.machine_files = dict(model_files), dict(machine_files)
        self._models = {name: name for name in executable_presets()} | self.model_files
        self._machines = {name: name for name in machine_names()} | self.machine_files
        given = {
            "model": next(iter(self.model_files), ""),
            "machines": ",".join(self.machine_files),
        }
        self.new_page = State(**{name: value for name, value in given.items() if value})
        self._kept: OrderedDict[Asked, Answer | TwinstreamError] = OrderedDict()
        self._lock, self._planning = Lock(), Lock()
        self._planner = Planner(steady_state)

    @property
    def models(self) -> list[str]:
        return list(self._models)

    @property
    def machines(self) -> list[str]:
        return list(self._machines)

    def command(self, state: State, machine: str) -> str:
        """The `plan` command of a state on one of its machines."""
        of_file = replace(state, model=self._models.get(state.model, state.model))
        return of_file.command(self._machines.get(machine, machine))

    def answer(self, state: State, machine: str) -> Answer | TwinstreamError:
        """The plan of a state on one of its machines, or why there is none."""
        with self._planning:  # one plan at a time: a second would only slow the first
            found = self.kept(state, machine)
            if found is None:
                try:
                    with gc_paused():
                        found = self._planned(state, machine)
                except TwinstreamError as error:
                    found = error
                self.keep((state, machine), found)
            return found

    def kept(self, state: State, machine: str) -> Answer | TwinstreamError | None:
        """The answer if it is known already."""
        return self._kept.get((state, machine))

    def keep(self, asked: Asked, answer: Answer | TwinstreamError) -> None:
        """Remember an answer, and forget the oldest of too many."""
        with self._lock:
            self._kept[asked] = answer
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)

    def _planned(self, state: State, machine: str) -> Answer:
        request = self._request(state, machine)
        schedule = self._planner.plan(request)
        timeline = api.simulate(schedule, request.machine)
        summary = summarize(schedule, timeline, request.machine)
        explanation = explain(schedule, timeline, request.machine)
        return Answer(request.machine, schedule, timeline, summary, explanation)

    def _request(self, state: State, machine: str) -> PlanRequest:
        seq_len = count_of(state.seq_len, "sequence length")
        if seq_len is None:
            raise StateError("sequence length is missing; give tokens, such as 8192")
        spec = load_model(_offered("model", state.model, self._models))
        profile = load_machine(_offered("machine", machine, self._machines))
        request = PlanRequest.of(
            spec,
            profile,
            step=TrainingStep(
                seq_len,
                count_of(state.tokens_per_step, "tokens a step"),
                recipe=_recipe(state, spec, profile),
            ),
            device_mem=state.device_mem.strip() or None,
            host_mem=state.host_mem.strip() or None,
            policy=state.policy or DEFAULT_POLICY,
        )
        effort: Any = state.effort or "normal"
        return request.with_effort(effort)


def _recipe(state: State, spec: ModelSpec, machine: Machine) -> Recipe:
    """What is trained, and with what kernels."""
    trained = trained_of(spec, state.lora.strip() or None, ())
    if state.optimizer_state not in ("", *OPTIMIZER_STATES):
        raise StateError(
            f"optimizer state '{state.optimizer_state[:40]}' is unknown; known: "
            f"{', '.join(OPTIMIZER_STATES)}"
        )
    kernels = kernels_named(machine, spec, state.kernels or None, state.attention or None)
    given = {"optimizer_state": state.optimizer_state} if state.optimizer_state else {}
    return Recipe.model_validate(
        {"kernels": kernels, "lora": trained.lora, "frozen": trained.frozen} | given
    )


def _offered(what: str, name: str, offered: Mapping[str, str]) -> str:
    """The file or name behind what is offered: a URL may not open any file."""
    if name not in offered:
        raise StateError(f"unknown {what} '{name}': {nearest(name, list(offered))}")
    return offered[name]
