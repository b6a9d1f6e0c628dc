"""What an update is priced as: that of a float32 master rounds nothing by chance."""

from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.kernel_costs.work import adamw_work


def test_a_master_is_priced_as_a_float32_update_and_on_gpus_as_before() -> None:
    (master,) = adamw_work(10**6, "bfloat16", state="float32_master")
    assert master.dtype == "float32"
    h100 = load_machine("h100")
    before = master.model_copy(update={"dtype": "bfloat16"})
    assert work_time(master, h100) == work_time(before, h100)
