"""The results file: lines of several writers, incomplete lines, and records of changed arms."""

from concurrent.futures import ThreadPoolExecutor

import msgspec

from esper.studies.contract import Arm
from esper.studies.results import RESULTS, Job, JobResult, append_result, current_results, read_results
from tests.support.example_studies import example_study, point

STUDY = example_study()


def record(arm="worse", world=100, study=STUDY, **changes):
    fields = {"task": "rescue", "arm": arm, "world": world, "versions": {"esper": "1"}, "seconds": 1.0}
    points = (point(0.5), point(1.0))
    return JobResult(**fields | changes, settings_hash=study.settings_hash(study.arm(arm)), points=points)


def test_records_survive_the_file(tmp_path):
    records = [record(world=100), record(world=101)]
    for each in records:
        append_result(tmp_path, each)

    assert read_results(tmp_path) == records
    assert read_results(tmp_path / "none") == []


def test_incomplete_line_costs_only_its_own_job(tmp_path):
    for world in (100, 101):
        append_result(tmp_path, record(world=world))
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes()[:-20])

    append_result(tmp_path, record(world=102))

    assert [r.world for r in read_results(tmp_path)] == [100, 102]


def test_concurrent_writers_lose_no_line(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda world: append_result(tmp_path, record(world=world)), range(100, 140)))
    assert sorted(r.world for r in read_results(tmp_path)) == list(range(100, 140))


def test_changed_settings_invalidate_the_records_of_their_arm_only():
    records = [record("worse"), record("better")]
    changed = Arm(name="better", kind="example_formula", settings={"base": 0.9})
    jobs = [Job("rescue", "worse", 100), Job("rescue", "better", 100)]

    now = current_results(msgspec.structs.replace(STUDY, arms=(STUDY.arms[0], changed)), records, jobs)

    assert list(current_results(STUDY, records, jobs).values()) == records
    assert list(now) == jobs[:1]


def test_last_record_of_a_job_counts():
    records = [record(seconds=1.0), record(seconds=2.0)]
    assert current_results(STUDY, records, [Job("rescue", "worse", 100)]) == {Job("rescue", "worse", 100): records[1]}
