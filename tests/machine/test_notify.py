import json
import sys

import pytest

from dwslm.machine.notify import fill, notify, parse


def test_words_are_split_as_a_shell_would_and_no_shell_sees_them(tmp_path):
    out = tmp_path / "out"
    script = tmp_path / "tell.py"
    script.write_text(f"import json, sys; json.dump([sys.argv[1:], json.load(sys.stdin)], open({str(out)!r}, 'w'))")
    words = parse(f"{sys.executable} {script} '{{event}}: {{reason}}' x")
    event = {"event": "failure", "reason": f"$(touch {tmp_path}/hacked); `id` {{run}}\n--flag", "run": "r"}
    assert notify(words, event) is None
    arguments, heard = json.loads(out.read_text())
    assert arguments == [f"failure: $(touch {tmp_path}/hacked); `id` {{run}} --flag", "x"]
    assert heard == event and not (tmp_path / "hacked").exists()


def test_a_field_at_the_start_of_a_word_begins_no_option():
    assert fill(["mail", "{run}", "-s{run}"], {"run": "--send=/etc/passwd"}) == [
        "mail",
        "send=/etc/passwd",
        "-s--send=/etc/passwd",
    ]
    assert fill(["{event}"], {}) == [""]
    assert len(fill(["{reason}"], {"reason": "x" * 10_000})[0]) == 500
    assert fill(["a{run}b"], {"run": "x\0y"}) == ["axyb"]


@pytest.mark.parametrize(
    ("command", "told"), [("", "is empty"), ("a 'b", "No closing quotation"), ("a {nosuch}", "braces around none of")]
)
def test_a_command_that_cannot_be_run_is_refused_at_once(command, told):
    with pytest.raises(ValueError, match=told):
        parse(command)


def test_what_goes_wrong_is_told_and_not_raised():
    assert notify(["/nosuch/program"], {}) == "/nosuch/program: No such file or directory"
    assert notify([sys.executable, "-c", "import sys; sys.exit('no network')"], {}).endswith(
        "ended with code 1: no network"
    )
    assert notify(["sleep", "60"], {}, timeout_s=0.1) == "sleep took more than 0.1 s"
    assert notify(["true"], {"event": "x" * 200_000}) is None  # it need not read what it is told
