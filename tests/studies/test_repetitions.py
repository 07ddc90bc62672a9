"""Tables of studies that were repeated under other rounding."""

import msgspec
import pytest

from esper.leyline.errors import ConfigError
from esper.studies.repetitions import REPEATED, repetition_tables
from esper.studies.results import JobResult, SavedStudy
from tests.support.example_studies import example_study, point


@pytest.fixture(autouse=True)
def _repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    REPEATED.mkdir(parents=True)


def results(quality, worlds=8, arm="worse"):
    """Return results of an arm; worlds differ by 0.01."""
    return [
        JobResult(
            task="rescue", arm=arm, world=world, settings_hash="", versions={}, seconds=1.0,
            points=(point(1.0, quality + 0.01 * (world - 100)),),
        )
        for world in range(100, 100 + worlds)
    ]  # fmt: skip


def save(study, records):
    saved = SavedStudy(command="esper study", study=study, versions=[], summary=None, records=records)
    (REPEATED.parent / f"{study.name}.json").write_bytes(msgspec.json.encode(saved))


def repeat(name, records):
    path = REPEATED / name
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path


def test_qualities_and_losses_have_a_table_each_and_the_worst_world():
    save(example_study(), results(0.5))
    save(example_study(name="losses", metric="test_loss"), results(0.5))
    paths = [repeat("example.avx2.jsonl", results(0.48)), repeat("losses.default.jsonl", results(0.48))]

    qualities, losses, summary = repetition_tables(paths).split("\n\n")

    assert qualities.splitlines()[0].endswith("| difference to the published run | lowest world |")
    assert qualities.splitlines()[2:] == [
        "| example | rescue | worse | 1 | avx2 | 8 | 51.5 ± 1.6 | −2.0 [−2.0, −2.0] | 48.0 |"
    ]
    assert losses.splitlines()[0].endswith("| difference to the published run | highest world |")
    assert losses.splitlines()[2:] == [
        "| losses | rescue | worse | 1 | default | 8 | 0.485 ± 0.016 | +0.020 [+0.020, +0.020] | 0.520 |"
    ]
    assert summary == "2 of 2 intervals of the difference exclude 0."


def test_few_worlds_have_differences_by_world_and_no_interval():
    save(example_study(name="losses", metric="test_loss"), results(0.5))
    text = repetition_tables([repeat("losses.default.jsonl", results(0.51, worlds=3))])
    assert "| 3 | 0.480 | by world: −0.010, −0.010, −0.010 | 0.490 |" in text
    assert "0 of 0 intervals" in text


@pytest.mark.parametrize(
    ("name", "records", "message"),
    [
        ("example.jsonl", [], "must be named STUDY.ROUNDING.jsonl"),
        ("exampel.avx2.jsonl", [], "repeats a study that is not saved: there is no studies/exampel.json"),
        ("example.avx2.jsonl", results(0.5, worlds=9), r"no result of rescue worse at budget 1 in worlds \[108\]"),
        ("example.avx2.jsonl", results(0.5, 1, "better"), r"no result of rescue better at budget 1 in worlds \[100\]"),
    ],
)
def test_repetition_without_published_results_is_refused(name, records, message):
    save(example_study(), results(0.5))
    with pytest.raises(ConfigError, match=message):
        repetition_tables([repeat(name, records)])
