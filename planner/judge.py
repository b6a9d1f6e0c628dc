"""The judge of plans: a simulator, passed in by the front door."""

from collections.abc import Callable

from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline

Judge = Callable[[Schedule], Timeline]
