"""`fastdiff sample --resume`: a killed run continues and gives the same files as an uninterrupted run."""

import json
import signal
import subprocess
import sys

import pytest

from fastdiff.requests import png

ASKED = ["--label", 0, "--label", 1, "-s", "3,5,9", "--steps", 5, "-b", 1, "--grid", "--json"]
# The command. It hangs when its third picture is synced to disk.
HANGS = """if True:
    import os, sys, time
    from fastdiff import cli
    flush, flushed = os.fsync, []
    def fsync(descriptor):
        flushed.append(descriptor)
        if len(flushed) == 3:
            time.sleep(600)
        flush(descriptor)
    os.fsync = fsync
    sys.exit(cli.main())
"""


@pytest.fixture
def contents(tmp_path, files):
    """Returns the bytes and modification time of each file below tmp_path."""

    def read() -> dict:
        return {
            name: ((tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mtime_ns) for name in files(tmp_path)
        }

    return read


@pytest.mark.skipif(sys.platform == "win32", reason="kills")
@pytest.mark.usefixtures("one_thread")  # like the killed run
def test_a_killed_run_goes_on_and_draws_each_picture_once(here, tiny, tmp_path, environment, contents):
    asked = ["sample", "-m", tiny, *ASKED, "-o"]
    command = [sys.executable, "-c", HANGS, *map(str, asked), "a"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    before = contents()
    kept = {name for name in before if name.endswith(".png")}
    assert len(kept) == 2 and "a/grid.png" not in kept

    done = here(*asked, "a", "--resume")
    assert done.returncode == 0, done.stderr
    assert "fastdiff: kept 2, wrote 4 picture" in done.stderr.splitlines()[-1]
    after = contents()
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}, "drawn or written again"
    paths = [json.loads(line)["path"] for line in done.stdout.splitlines()]
    assert sorted([*paths, "a/grid.png"]) == sorted(after), "each picture once, and no temporary file"

    whole = here(*asked, "b")
    assert whole.returncode == 0, whole.stderr
    every = contents()
    assert all(every[name][0] == every[name.replace("a/", "b/")][0] for name in after), "pixels and settings"
    lines = {line["path"]: line for line in map(json.loads, whole.stdout.splitlines())}
    resumed = {line["path"].replace("a/", "b/"): line["settings"] for line in map(json.loads, done.stdout.splitlines())}
    assert resumed == {path: line["settings"] for path, line in lines.items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kills")
def test_a_write_that_was_killed_leaves_what_the_next_run_removes(here, tiny, tmp_path, environment, files):
    code = """if True:
        import os, signal, sys
        from fastdiff import cli
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(cli.main())
    """
    args = ["sample", "-m", str(tiny), "--label", "0", "--num-images", "1", "--steps", "1"]
    subprocess.run([sys.executable, "-c", code, *args], cwd=tmp_path, env=environment, capture_output=True)
    (leftover,) = files(tmp_path)
    assert leftover.startswith("outputs/.fastdiff-") and leftover.endswith(".tmp")
    assert here(*args, "--resume").returncode == 0
    assert files(tmp_path) == ["outputs/class0-0.png"]


def test_a_finished_run_is_left_as_it_is_and_another_one_refused(here, tmp_path, contents, refused):
    args = ["sample", "--label", 0, "-s", "3,5", "--steps", 1, "--grid"]
    assert here(*args).returncode == 0
    before = contents()
    done = here(*args, "--resume")
    assert done.returncode == 0 and "fastdiff: kept 2, wrote 0 pictures in " in done.stderr
    assert "fastdiff: drawing" not in done.stderr, "no progress without pictures"
    for flags, message in [
        (["--steps", 2], r"outputs/fluent-3d-hearts-3\.png was drawn with num_inference_steps 1, not 2; .*--overwrite"),
        (["--cfg-scale", 2, "--eta", 1], r".*-3\.png was drawn with eta 0\.0, not 1\.0, guidance_scale 4\.0, not 2\.0"),
        (["--dtype", "bfloat16"], r'.*-3\.png was drawn with dtype "float32", not "bfloat16"'),
        (["-s", "3,5,6"], r"outputs/grid\.png was drawn with seed \[3, 5\], not \[3, 5, 6\]"),
        (["--seed", "random"], "--resume cannot repeat random seeds; give the seeds of the interrupted run with "),
        (["--overwrite"], "argument --(overwrite|resume): not allowed with argument --(overwrite|resume)"),
    ]:
        refused(here(*args, "--resume", *flags), message)
    assert contents() == before


def test_what_is_no_picture_of_ours_is_refused(here, tmp_path, refused):
    args = ["sample", "--label", 0, "--num-images", 1, "--steps", 1, "--device", "cpu", "-o", "a.png", "--resume"]
    (tmp_path / "a.png").touch()
    refused(here(*args), r"--resume: a\.png cannot be read as a PNG .*; choose another place with -o")
    (tmp_path / "a.png").unlink()
    assert here(*args).returncode == 0
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[:-20])
    refused(here(*args), r"--resume: a\.png cannot be read as a PNG \(it is truncated\)")
    pixels = whole.index(b"IDAT") + 40
    (tmp_path / "a.png").write_bytes(whole[:pixels] + bytes(40) + whole[pixels + 40 :])
    refused(here(*args, "--grid"), r"a\.png is damaged .*; remove it, or draw it again with --overwrite")


def test_a_picture_without_one_of_its_settings_is_refused(here, tmp_path, refused):
    from PIL import Image

    args = ["sample", "--label", 0, "--num-images", 1, "--steps", 1, "--device", "cpu", "-o", "a.png"]
    assert here(*args).returncode == 0
    record = png.read_settings(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        kept = {
            name: value
            for name, value in record.items()
            if name not in ("schema", "numerics", "use_clipped_model_output")
        }
        (tmp_path / "a.png").write_bytes(png.encode(image, kept))
    refused(here(*args, "--resume"), r"a\.png was drawn with use_clipped_model_output null, not true; choose")


def test_another_device_and_other_versions_are_kept(here, tmp_path):
    from PIL import Image

    args = ["sample", "--label", 0, "--num-images", 1, "--steps", 1, "--device", "cpu", "-o", "a.png"]
    assert here(*args).returncode == 0
    record = png.read_settings(tmp_path / "a.png")
    other = {name: value for name, value in record.items() if name not in ("schema", "numerics")}
    other |= {"device": "NVIDIA H200", "versions": {"fastdiff": "0.1", "torch": "2.9"}}
    with Image.open(tmp_path / "a.png") as image:
        (tmp_path / "a.png").write_bytes(png.encode(image, other))
    done = here(*args, "--resume")
    assert done.returncode == 0 and "kept 1, wrote 0 pictures" in done.stderr, done.stderr
