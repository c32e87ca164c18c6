"""The fixtures of the commands of launch."""

from tests.launch.conftest import no_process, refused

__all__ = ['no_process', 'refused']
