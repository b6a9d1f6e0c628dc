"""What the explorer is asked, in the page's URL and in the controls, and the last few answers."""

import shlex
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from threading import Lock
from urllib.parse import parse_qs, urlencode

from twinstream.cost.bill import price_at, prices_of
from twinstream.hardware_profiles.clusters.loader import cluster_names
from twinstream.hardware_profiles.loader import machine_names
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.models.presets import executable_presets
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner, gc_paused
from twinstream.planner.request import DEFAULT_POLICY
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.python_file import split_name
from twinstream.schedule.worker_processes import WorkerDied, Workers
from twinstream.study.answer import Answer
from twinstream.study.processes import new_planner
from twinstream.study.query import Query
from twinstream.study.questions import query_of
from twinstream.study.values import Value

_MOST_KEPT = 48
_LARGEST_COUNT = 2**40
_MOST_DIGITS = 13
_TEXTS = ("device_mem", "host_mem", "lora", "optimizer_state", "kernels", "attention")
_COUNTS = {"seq_len": "sequence length", "tokens_per_step": "tokens a step", "gpus": "GPUs"}


class StateError(TwinstreamError):
    """A control or a part of the URL that cannot be used."""


class ExploreError(TwinstreamError):
    """The page cannot be served."""


class RefusedPlan(TwinstreamError):
    """The process beside ended before it had a plan."""


@dataclass(frozen=True)
class State:
    """The controls as texts, as they are typed and as they stand in the URL; "" is not given.

    `machines` are of machines and of clusters; `gpus` is of the latter. `price` is of an hour of
    one GPU, of all or by name, as `h100=2.5,b200=6`; no plan follows from it.
    """

    model: str = "8b"
    machines: str = "h100"
    seq_len: str = "8192"
    tokens_per_step: str = "32768"
    device_mem: str = ""
    host_mem: str = ""
    policy: str = DEFAULT_POLICY
    effort: str = "quick"
    lora: str = ""
    optimizer_state: str = ""
    kernels: str = ""
    attention: str = ""
    gpus: str = ""
    price: str = ""

    def at_url(self, search: object) -> "State":
        """The state in a URL's query; what it lacks is as here, in a new page.

        Raises:
            StateError: it is no query.
        """
        if not isinstance(search, str | None):
            raise StateError("the URL's query is no text")
        given = parse_qs((search or "").removeprefix("?"), keep_blank_values=True)
        known = {field.name for field in fields(State)}
        return replace(self, **{name: v[-1] for name, v in given.items() if name in known})

    @property
    def url(self) -> str:
        return "?" + urlencode(vars(self))

    @property
    def machine_names(self) -> Sequence[str]:
        return [name for name in self.machines.split(",") if name]

    @property
    def price_fault(self) -> StateError | None:
        """The error of the price, if it is wrong."""
        if not self.price.strip() or prices_of(self.price) is not None:
            return None
        return StateError(f"price '{self.price[:40]}' is none: write 2.50 or h100=2.5,b200=6")

    def price_at(self, names: Sequence[str]) -> float | None:
        """The price of what has these names, None where none is given or it is wrong."""
        return price_at(prices_of(self.price), names) if self.price.strip() else None

    @property
    def unpriced(self) -> "State":
        """The same without a price: all that a plan follows from."""
        return replace(self, price="")

    @property
    def refined(self) -> "State | None":
        """The same with the normal effort, where this asks for a quick plan of `optimal`."""
        quick = self.effort == "quick" and self.policy in ("", DEFAULT_POLICY)
        return replace(self, effort="normal") if quick else None

    def values(self, kind: str, place: str) -> dict[str, Value]:
        """The values of a query on a machine, or a cluster, by the names of `plan`'s options.

        Raises:
            StateError: a count is none, or one is missing.
        """
        counts = {name: count_of(getattr(self, name), told) for name, told in _COUNTS.items()}
        if counts["seq_len"] is None:
            raise StateError("sequence length is missing; give tokens, such as 8192")
        names = (*_TEXTS, "policy", "effort") if kind == "machine" else _TEXTS
        given: dict[str, Value | None] = {
            name: getattr(self, name).strip() or None for name in names
        }
        if given.get("policy") not in (None, DEFAULT_POLICY):
            del given["effort"]  # which only `optimal` has
        if kind == "machine":
            del counts["gpus"]
        found = {"model": self.model, kind: place, **counts, **given}
        return {name: value for name, value in found.items() if value is not None}

    def command(self, place: str, kind: str = "machine") -> str:
        """The `plan` command that gives the same figures."""
        try:
            values = self.values(kind, place)
        except StateError:
            typed = {name: text.strip() for name, text in vars(self).items() if text.strip()}
            del typed["machines"]
            values = {"model": self.model, kind: place, **typed}
        if self.price.strip():
            values["price"] = self.price.strip()
        given = (
            f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
            for name, value in values.items()
        )
        return f"twinstream plan {' '.join(given)}"


def count_of(text: str, name: str) -> int | None:
    """A positive whole number, or None where nothing is given.

    Raises:
        StateError: it is neither.
    """
    if not text.strip():
        return None
    digits = text.replace(",", "").replace("_", "").strip()
    number = int(digits) if digits.isdecimal() and len(digits) <= _MOST_DIGITS else 0
    if not 0 < number <= _LARGEST_COUNT:
        raise StateError(
            f"{name} needs a whole number from 1 to {_LARGEST_COUNT:,}, got '{text[:40]}'"
        )
    return number


Asked = tuple[State, str]  # and the machine or cluster


class Answers:
    """Answers by state and machine or cluster. Models and profiles are those offered, by name.

    A new page begins with those that were given, the first model and all machines, and the price.
    """

    def __init__(
        self, model_files: Mapping[str, str], machine_files: Mapping[str, str],
        cluster_files: Mapping[str, str] | None = None, price: str = "",
    ) -> None:  # fmt: skip
        self._models = {name: name for name in executable_presets()} | dict(model_files)
        self._places = {
            "machine": {name: name for name in machine_names()} | dict(machine_files),
            "cluster": {name: name for name in cluster_names()} | dict(cluster_files or {}),
        }
        given = {
            "model": next(iter(model_files), ""),
            "machines": ",".join([*machine_files, *(cluster_files or {})]),
            "price": price,
        }
        self.new_page = State(**{name: value for name, value in given.items() if value})
        self._kept: OrderedDict[Asked, Answer | TwinstreamError] = OrderedDict()
        self._lock, self._planning = Lock(), Lock()
        self._planner = new_planner()

    @property
    def models(self) -> list[str]:
        return list(self._models)

    @property
    def machines(self) -> list[str]:
        """Machines and clusters."""
        return [name for places in self._places.values() for name in places]

    def command(self, state: State, place: str) -> str:
        """The `plan` command of a state on one of its machines or clusters."""
        of_file = replace(state, model=self._models.get(state.model, state.model))
        kind, names = self._offering(place)
        answer = self.kept(state, place)
        if isinstance(answer, Answer) and state.price_at(answer.place_names) is None:
            of_file = of_file.unpriced  # `plan` refuses prices of others
        return of_file.command(names.get(place, place), kind)

    def answer(self, state: State, place: str) -> Answer | TwinstreamError:
        """The plan of a state on one of its machines or clusters, or why there is none."""
        with self._planning:  # one plan at a time: a second would only slow the first
            found = self.kept(state, place)
            if found is None:
                try:
                    found = planned(self.query(state, place), self._planner)
                except TwinstreamError as error:
                    found = error
                self.keep((state, place), found)
            return found

    def query(self, state: State, place: str) -> Query:
        """Return the query of a state; a URL may not open any file, so names are those offered.

        Raises:
            TwinstreamError: a control cannot be used.
        """
        kind, names = self._offering(place)
        model = _offered("model", state.model, self._models)
        where = _offered("machine", place, names)
        if split_name(state.policy) is not None:
            raise StateError(f"policy '{state.policy}' is of a file, and a page opens none")
        return query_of(replace(state, model=model).values(kind, where))

    def _offering(self, place: str) -> tuple[str, Mapping[str, str]]:
        """Tell whether a name is of a cluster or of a machine, and all of that kind."""
        kind = "cluster" if place in self._places["cluster"] else "machine"
        return kind, self._places[kind]

    def kept(self, state: State, place: str) -> Answer | TwinstreamError | None:
        """The answer if it is known already; of a wrong price what is wrong."""
        return state.price_fault or self._kept.get((state.unpriced, place))

    def keep(self, asked: Asked, answer: Answer | TwinstreamError) -> None:
        """Remember an answer, and forget the oldest of too many."""
        state, place = asked
        with self._lock:
            self._kept[state.unpriced, place] = answer
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)


def planned(query: Query, planner: Planner) -> Answer:
    """
    Raises:
        TwinstreamError: nothing fits, or the query contradicts itself.
    """
    with gc_paused():
        return query.answer(planner=planner)


def _offered(what: str, name: str, offered: Mapping[str, str]) -> str:
    """The file or name behind what is offered."""
    if name not in offered:
        raise StateError(f"unknown {what} '{name}': {nearest(name, list(offered))}")
    return offered[name]


class Refining:
    """Plans of normal effort, made while the page shows the quick ones.

    One process at a time, for one page's machines one after the other; then it ends. So quick plans
    never wait for a normal one, and memory that planning took is given back.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._lock = Lock()
        self._workers: Workers[tuple[Asked, Query], Answer] | None = None
        self._asked: Sequence[Asked] = ()

    def follow(self, wanted: Sequence[Asked], *, anew: bool) -> None:
        """Keep what is done, and see that what is wanted gets done.

        Args:
            wanted: what the page would show.
            anew: whether the page asks for the first time; it then ends what runs for others.
        """
        with self._lock:
            self._collect()
            missing = [asked for asked in wanted if self._answers.kept(*asked) is None]
            busy = self._workers is not None and (not anew or set(missing) <= set(self._asked))
            if (missing and not busy) or (anew and not missing):
                self._end()
            if missing and not busy:
                items = [(asked, self._answers.query(*asked)) for asked in missing]
                self._workers, self._asked = Workers(_refined, items, 1, new_planner), missing

    def end(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _collect(self) -> None:
        if self._workers is None:
            return
        try:
            for (asked, _), found in self._workers.ready(0):
                if isinstance(found, Exception) and not isinstance(found, TwinstreamError):
                    found = RefusedPlan(f"a bug in twinstream: {type(found).__name__}: {found}")
                self._answers.keep(asked, found)
        except WorkerDied as died:
            for asked in self._asked:
                if self._answers.kept(*asked) is None:
                    self._answers.keep(asked, _refused(died))
        if not self._workers.busy:
            self._end()

    def _end(self) -> None:
        if self._workers is not None:
            self._workers.end()
            self._workers = None


def _refused(died: WorkerDied) -> RefusedPlan:
    return RefusedPlan(
        f"the normal plan could not be made: its process ended with code {died.exitcode}, "
        "probably because memory ran out; run the command below on a machine with more"
    )


def can_be_refined(answer: Answer | TwinstreamError) -> bool:
    """A quick plan can, and so can a refusal for want of memory; a wrong question stays wrong."""
    if isinstance(answer, Answer):
        return answer.can_be_refined
    return isinstance(answer, InfeasiblePlan)


def _refined(item: tuple[Asked, Query], planner: Planner) -> Answer:
    return planned(item[1], planner)
