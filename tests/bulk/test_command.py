"""`fastdiff bulk` and `fastdiff status`: their output before drawing, and for finished runs."""

import hashlib
import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from PIL import Image
from torch.distributed.elastic.multiprocessing import SignalException

from fastdiff.cli import main
from fastdiff.requests import png
from tests.checkpoints.single_files import ldm
from tests.parity.z_image import tiny as captions

pytestmark = pytest.mark.usefixtures("one_thread")  # like a worker


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def finished(make_plan, worker, arguments):
    """A finished run of 20 pictures, and the command that drew it."""
    worker(make_plan()).work()
    return arguments


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_it_draws_below_a_bar(here, arguments, make_plan, worker, records, capsys, tmp_path):
    code, out, err = said(capsys, *arguments, "--json", "--workers", "3")
    assert code == 0 and re.fullmatch(r"fastdiff: 20 of 20 pictures are in out in \d+\.\d s", err.splitlines()[-1]), err
    assert err.startswith("fastdiff: drawing 20 pictures into out\n") and "\r" not in err
    lines = [json.loads(line) for line in out.splitlines()]
    assert sorted(line["shard"] for line in lines) == [0, 1, 2, 3] and sum(line["count"] for line in lines) == 20
    assert here[0].nproc_per_node == 3
    worker(make_plan(), tmp_path / "alone").work()
    assert records(tmp_path / "out") == records(tmp_path / "alone")


def test_a_terminal_has_a_bar_and_quiet_has_nothing(here, arguments, capsys, monkeypatch):
    assert said(capsys, *arguments, "--quiet", "-o", "quiet", "--json")[2] == ""
    monkeypatch.setattr("fastdiff.runs.progress.in_terminal", lambda: True)
    code, _, err = said(capsys, *arguments)
    bar = err.rsplit("\r", 1)[-1].splitlines()[0]
    rate = r"20\.0/20 pictures \[\d\d:\d\d<00:00, +\d+\.\d+ ?pictures/s\]"
    assert code == 0 and re.search(rate, bar), "a rate even for a short run"


def test_a_worker_on_the_cpu_has_one_thread(here, arguments):
    """A worker uses one thread, whatever the environment says: the number of threads changes the bits."""
    torch.set_num_threads(2)
    try:
        assert main([*arguments, "--num-images", "1", "--steps", "1"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


def test_all_done(finished, capsys):
    assert said(capsys, *finished) == (0, "", "fastdiff: all 4 shards in out are done\n")


def test_what_is_done_with_other_files_of_the_model_is_refused(finished, capsys, tmp_path):
    path = tmp_path / "out/plan.json"
    plan = json.loads(path.read_text())
    plan["fingerprint"]["model files"] = "1" * 64
    path.write_text(json.dumps(plan))
    code, _, err = said(capsys, *finished)
    assert code == 2 and re.search(rf"bits would differ from .*: this is model files \w{{64}}, not {'1' * 64}; ", err)
    assert said(capsys, *finished, "--allow-mixed")[0] == 0


def test_what_is_done_below_a_damaged_plan_is_told(finished, here, capsys, tmp_path):
    (tmp_path / "out/plan.json").write_text("{")
    code, _, err = said(capsys, *finished)
    assert code == 1 and "error: out/plan.json cannot be read back; choose another folder with --out" in err


def test_a_worker_of_other_bits_is_refused_in_one_line(here, arguments, make_plan, worker, pipes, capsys):
    plan = make_plan()
    worker(plan, fingerprint={**pipes(plan)[1], "torch": "1.0"})
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "") and "Traceback" not in err
    assert err.count("fastdiff: error: ") == 1 and ": this is torch 2" in err


def test_a_full_disk_ends_it_in_one_line(here, arguments, make_plan, worker, tmp_path, records, capsys):
    resource = pytest.importorskip("resource")  # Unix only
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))  # less than a tar of 6 pictures
    try:
        code, out, err = said(capsys, *arguments, "--format", "webdataset")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, out) == (1, "") and "Traceback" not in err and err.count("fastdiff: error: ") == 1
    assert "cannot write" in err and "(File too large); free space, and run the same command again" in err
    assert sorted(os.listdir(tmp_path / "out")) == ["plan.json", "shards"]
    assert not list((tmp_path / "out/shards").glob("0*"))
    for name in ("out", "alone"):
        worker(make_plan(format="webdataset"), tmp_path / name).work()
    assert records(tmp_path / "out") == records(tmp_path / "alone")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_launcher_that_is_told_to_stop_says_so(arguments, monkeypatch, capsys, number, code):
    def stopped(*command):
        raise SignalException("told to stop", number)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *asked: stopped)
    said_first = "fastdiff: drawing 20 pictures into out\n"
    said_last = "fastdiff: interrupted; 0 of 20 pictures are in out; run the same command again to resume\n"
    assert said(capsys, *arguments) == (code, "", said_first + said_last)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("answer", [signal.SIG_DFL, signal.SIG_IGN], ids=["a terminal", "nohup"])
def test_a_terminal_that_is_closed_ends_it_but_under_nohup(here, arguments, capsys, answer):
    before = signal.signal(signal.SIGHUP, answer)
    try:
        assert said(capsys, *arguments)[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert here[0].signals_to_handle == "SIGINT,SIGTERM" + (",SIGHUP" if answer == signal.SIG_DFL else "")


def test_what_is_gone_or_damaged_is_told_and_would_be_drawn_again(finished, capsys, tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr("fastdiff.bulk.launching.launch", lambda *args: launched.append(args))
    shutil.rmtree(tmp_path / "out/000001")
    path = tmp_path / "out/000002/000013.png"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, _, err = said(capsys, *finished)
    assert "shard 000001: its files are missing or have the wrong size; it will " in err and "000002" not in err
    assert len(launched) == 1 and "12 of 20" not in err and "14 of 20 pictures are in out" in err
    assert "shard 000002: 000002 is damaged; it will be drawn again" in said(capsys, *finished, "--verify")[2]
    assert launched[-1][0] == [*finished[1:], "--verify"] and code == 0


def test_shards_that_are_given_up_are_told_and_end_it_with_1(finished, capsys, monkeypatch):
    def launch(arguments, plan, folder, options):
        folder.error(plan.shards[3]).write_text('{"failures": ["NaN", "NaN", "NaN in it"]}')

    monkeypatch.setattr("fastdiff.bulk.launching.launch", launch)
    os.remove("out/shards/000003.json")
    code, _, err = said(capsys, *finished)
    assert (code, err.splitlines()[-2:]) == (
        1,
        [
            "fastdiff: shard 000003: NaN in it",
            "fastdiff: error: gave up on 1 of 4 shards; run the same command again to retry them",
        ],
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "3"], "this one has steps 3, not 2; choose another folder"),
        (["--seed", "random"], "seed random: a resumed run would draw other pictures"),
        (["--workers", "0"], "0 is not a whole number of at least 1"),
        (["--format", "jpg"], "invalid choice: 'jpg'"),
        (["--label", "a"], "has no labels"),
        (["--spec", "no.csv"], "spec no.csv does not exist"),
        (
            ["--spec", "a.csv", "--styles", "b.csv", "--style", "x"],
            "style: does not change the prompts of --spec; write",
        ),
        (["--styles", "b.csv", "--spec", "a.csv"], "style: does not change the prompts of --spec; write"),
    ],
)
def test_refusals(finished, capsys, flags, message):
    code, out, err = said(capsys, *finished, *flags)
    assert (code, out) == (2, "") and err.startswith("fastdiff: error: ") and message in err and err.count("\n") == 1


def test_status(finished, capsys, tmp_path):
    assert said(capsys, "status", "out") == (0, "20 of 20 pictures, 4 of 4 shards\n", "")
    (tmp_path / "out/shards/000003.json").unlink()
    lease = {"host": "another", "pid": 7, "start": "5", "token": "t", "drawn": 1}
    (tmp_path / "out/shards/000003.lease-1").write_text(json.dumps(lease))
    (tmp_path / "out/shards/000002.json").unlink()
    (tmp_path / "out/shards/000002.error.json").write_text('{"failures": ["NaN", "NaN in it"]}')
    code, out, _ = said(capsys, "status", "out")
    lines = out.splitlines()
    assert code == 0 and lines[:2] == ["12 of 20 pictures, 2 of 4 shards", "shards in progress: 1, on another:7"]
    assert re.fullmatch(r"[\d.]+ pictures/s, \d+:\d\d:\d\d left", lines[2])
    assert lines[3] == "gave up on shard 000002: NaN in it"
    found = json.loads(said(capsys, "status", "out", "--json")[1])
    assert (found["drawn"], found["in_hand"], found["given_up"]) == (12, 1, {"000002": "NaN in it"})


def test_status_of_no_run(capsys, tmp_path):
    code, _, err = said(capsys, "status", str(tmp_path))
    assert code == 2 and "has no plan.json of a bulk run; give the --out folder" in err


def pixels(folder) -> dict[str, bytes]:
    return {path.name: Image.open(path).tobytes() for path in sorted(folder.rglob("*.png"))}


def test_a_single_file_draws_the_pictures_of_its_folder(here, tmp_path, capsys):
    _, pipe, folder, file = ldm.save_pipeline("sd1", tmp_path)
    flags = ["--prompt", "the cat", "--num-images", "3", "--steps", "2", "--dtype", "float32", "--device", "cpu"]
    of_file = ["bulk", "--model", "model.safetensors", "--config", str(folder), *flags, "--out", "files"]
    assert main(of_file) == 0
    assert main(["bulk", "--model", str(folder), *flags, "--out", "folders"]) == 0
    pictures = pixels(tmp_path / "files")
    assert len(set(pictures.values())) == 3 and pictures == pixels(tmp_path / "folders")
    record = png.read_settings(next((tmp_path / "files").rglob("*.png")))
    assert record["model"] == "model.safetensors" and record["config"] == str(folder)
    assert record["model_hash"] == hashlib.sha256(file.read_bytes()).hexdigest()
    ldm.save({key: 2 * tensor for key, tensor in ldm.whole("sd1", pipe).items()}, file)
    capsys.readouterr()
    assert main(of_file) == 2
    assert "bits would differ from those in files: this is model files" in capsys.readouterr().err


def test_z_image_in_8_bits_draws_what_sample_draws(here, randomise, capsys, digests, tmp_path):
    captions.pipeline(randomise).save_pretrained(tmp_path / "z-image")
    asked = [
        "-m",
        "z-image",
        "--prompt",
        "a cat",
        "--prompt",
        "a dog in the snow",
        "--num-images",
        "2",
        "--device",
        "cpu",
    ]
    asked += ["--steps", "2", "--cfg-scale", "2", "--height", "16", "--width", "24"]
    for precision in ("int8", "full"):
        options = [*asked, "--precision", precision]
        for command in ("bulk", "sample"):
            assert said(capsys, command, *options, "-o", f"{command}-{precision}")[0] == 0
        bulk, sample = ({*digests(tmp_path / f"{command}-{precision}").values()} for command in ("bulk", "sample"))
        assert bulk == sample and len(sample) == 4
    assert not sample & {*digests(tmp_path / "sample-int8").values()}
    first = sorted((tmp_path / "sample-int8").glob("*.png"))[0]
    assert png.read_settings(first)["precision"] == "int8"
    assert said(capsys, "sample", "--from", str(first), "--device", "cpu", "-o", "again")[0] == 0
    assert (tmp_path / "again" / first.name).read_bytes() == first.read_bytes()
    code, _, err = said(capsys, "sample", *asked, "--offload", "-o", "offloaded")
    assert code == 2 and "offload: it saves GPU memory, but the device is the CPU; leave it out" in err
