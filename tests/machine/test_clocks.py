from dwslm.machine.clocks import breaks_cap, command, service


def test_a_cap_is_broken_by_more_than_a_step_of_the_clock():
    assert not breaks_cap(1980, 1980) and not breaks_cap(1995, 1980) and breaks_cap(2010, 1980)


def test_the_command_and_the_unit_set_the_same_cap():
    assert command(2400) == "sudo nvidia-smi -pm 1 && sudo nvidia-smi -lgc 0,2400"
    unit = service(2400)
    assert "ExecStart=/usr/bin/nvidia-smi -lgc 0,2400\n" in unit and "WantedBy=multi-user.target" in unit
    assert unit.index("[Unit]") < unit.index("[Service]") < unit.index("[Install]")
