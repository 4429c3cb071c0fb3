"""The cap on a GPU's clock: whether it holds, and how it is set, which needs root and is forgotten at every boot.

Nothing here sets a clock.
"""

SLACK_MHZ = 15
"""Clocks come in steps of 15 MHz."""


def breaks_cap(seen_mhz: int, cap_mhz: int) -> bool:
    """Whether a clock that was seen says that the cap is not set."""
    return seen_mhz > cap_mhz + SLACK_MHZ


def command(cap_mhz: int) -> str:
    """The command that caps all GPUs, until the next boot or reload of the driver."""
    return f"sudo nvidia-smi -pm 1 && sudo nvidia-smi -lgc 0,{cap_mhz}"


def service(cap_mhz: int) -> str:
    """The systemd unit that caps all GPUs at every boot."""
    return f"""\
# /etc/systemd/system/gpu-clock-cap.service
# sudo systemctl daemon-reload && sudo systemctl enable --now gpu-clock-cap
[Unit]
Description=Cap GPU clocks at {cap_mhz} MHz
After=multi-user.target nvidia-persistenced.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-smi -pm 1
ExecStart=/usr/bin/nvidia-smi -lgc 0,{cap_mhz}
ExecStop=/usr/bin/nvidia-smi -rgc

[Install]
WantedBy=multi-user.target
"""
