"""Trains a run: `python train.py experiment=main`, `python train.py resume=RUN`."""

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dwslm.cli.errors import one_line_errors, run_hydra
from dwslm.cli.launch import launch
from dwslm.config import CONFIGS, register, to_request

register()


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def main(config: DictConfig) -> None:
    with one_line_errors():
        launch(to_request(config), list(HydraConfig.get().overrides.task))


if __name__ == "__main__":
    run_hydra(main)
