"""Measured collectives from CSV and from what nccl-tests prints; what is neither is refused."""

import pytest

from twinstream.hardware_profiles.collectives.reading import read_points
from twinstream.hardware_profiles.errors import CollectiveTableError

DEVICE = "#  Rank {0:2} Group  0 Pid  1887 on {1:>10} device {0:2} [0x8d] NVIDIA H100 80GB HBM3\n"
HEADER = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501
ROWS = """           0             0     float     sum      -1     5.70    0.00    0.00      0     5.54    0.00    0.00      0
     1048576        262144     float     sum      -1    27.76   37.78   66.11      0    27.49   38.15   66.76      0
    16777216       4194304     float     sum      -1   121.33  138.28  242.00      0   120.47  139.26  243.71    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 123.4
"""  # noqa: E501


def devices(*hosts):
    lines = [DEVICE.format(rank, host) for rank, host in enumerate(hosts)]
    return "# nThread 1 nGpus 1 minBytes 0 maxBytes 16777216\n#\n# Using devices\n" + "".join(lines)


ONE_NODE = devices(*["worker-0"] * 8)


def read(tmp_path, text, name="run.txt"):
    path = tmp_path / name
    path.write_text(text)
    return read_points(path)


def test_what_nccl_tests_prints_is_read_with_both_times(tmp_path):
    text = "# Collective test starting: all_reduce_perf\n" + ONE_NODE + HEADER + ROWS
    small, large = read(tmp_path, text)
    assert small.gpu == "NVIDIA H100 80GB HBM3"
    assert (small.collective, small.ranks, small.ranks_per_node) == ("all_reduce", 8, 8)
    assert (small.dtype, small.size_bytes) == ("float", 2**20)
    assert (small.time_us, small.in_place_us) == (27.76, 27.49)
    assert (large.size_bytes, large.time_us, large.in_place_us) == (2**24, 121.33, 120.47)


def test_ranks_on_several_hosts_are_ranks_of_several_nodes(tmp_path):
    text = devices(*["a"] * 4, *["b"] * 4) + HEADER + ROWS
    points = read(tmp_path, text, "all_gather_perf.log")
    assert {(p.collective, p.ranks, p.ranks_per_node) for p in points} == {("all_gather", 8, 4)}


def test_several_runs_in_one_file_are_told_apart(tmp_path):
    first = "$ ./build/alltoall_perf -b 8 -e 16M -f 2 -g 8\n" + ONE_NODE + HEADER + ROWS
    second = "$ ./build/sendrecv_perf -g 2\n" + devices("x", "y") + HEADER + ROWS
    points = read(tmp_path, first + second)
    assert [(p.collective, p.ranks, p.ranks_per_node) for p in points] == [
        *[("all_to_all", 8, 8)] * 2,
        *[("send_recv", 2, 1)] * 2,
    ]


def test_a_sum_is_known_by_its_bus_bandwidth(tmp_path):
    assert read(tmp_path, ONE_NODE + HEADER + ROWS)[0].collective == "all_reduce"
    scattered = ROWS.replace("242.00", "121.00")
    assert read(tmp_path, ONE_NODE + HEADER + scattered)[0].collective == "reduce_scatter"


def test_an_older_table_without_root_is_read(tmp_path):
    header = (
        "#   size   count   type  redop   time  algbw  busbw  error   time  algbw  busbw  error\n"
    )
    row = " 1048576  262144  float    sum  27.76  37.78  66.11  1e-07  27.49  38.15  66.76  1e-07\n"
    (point,) = read(tmp_path, ONE_NODE + header + row)
    assert (point.time_us, point.in_place_us) == (27.76, 27.49)


CSV = "gpu_type,n,collective,dtype,bytes,time_us\nH100,8,alltoall,half,512,7.4\n"


def test_a_csv_is_read_with_its_comments(tmp_path):
    (point,) = read(tmp_path, "# of a test\n" + CSV, "table.csv")
    assert (point.gpu, point.collective, point.ranks_per_node) == ("H100", "all_to_all", 8)
    assert (point.dtype, point.size_bytes, point.time_us) == ("half", 512, 7.4)
    (point,) = read(tmp_path, "n,ranks_per_node,collective,bytes,time_us\n16,8,AllReduce,8,9\n")
    assert (point.collective, point.ranks, point.ranks_per_node) == ("all_reduce", 16, 8)
    assert point.dtype is None


WRONG = {
    "": "is empty",
    "gpu_type,n,bytes\nH100,8,512\n": "has no column collective, time_us",
    CSV.splitlines()[0]: "has no rows",
    CSV + "H100,8,all_broadcast,half,512,7.4\n": "line 3: unknown collective 'all_broadcast'",
    CSV + "H100,8,all_reduce,half,512,fast\n": "line 3: could not convert string to float: 'fast'",
    CSV + "H100,8,all_reduce,half,512,-1\n": "line 3: time_us: Input should be greater than 0",
    CSV + "H100,8,all_reduce,half,0.5,7\n": "line 3: 0.5 is no whole number",
    CSV + "H100,inf,all_reduce,half,8,7\n": "line 3: ",
    ONE_NODE + HEADER: "has no rows under the header of nccl-tests",
    HEADER + ROWS: "no line '# Rank 0 ... on HOST device ...'",
    devices("a", "a", "b") + HEADER + ROWS: "3 ranks on 2 hosts, 2 on a, 1 on b",
    devices("a") + HEADER + ROWS: "1 ranks on 1 hosts",
    ONE_NODE + HEADER + ROWS.replace("sum", "none"): "nothing says which collective this is",
    ONE_NODE + HEADER + ROWS.replace("66.11      0", "66.11      7"): "#wrong is 7",
    ONE_NODE + HEADER + ROWS.replace("27.49", "27.49 1"): "14 values for the 13 columns",
    ONE_NODE + HEADER + ROWS.replace("27.76", "nan"): "1048576 bytes in nan us",
    ONE_NODE + HEADER.replace("algbw", "rate") + ROWS: "no column algbw",
    "$ broadcast_perf\n" + ONE_NODE + HEADER + ROWS: "unknown collective 'broadcast'",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_what_is_no_table_is_one_sentence(text, tmp_path):
    with pytest.raises(CollectiveTableError) as refused:
        read(tmp_path, text)
    assert WRONG[text] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CollectiveTableError, match="cannot read"):
        read_points(tmp_path / "no.csv")
