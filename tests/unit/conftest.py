from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes tells of the machine, which may be busy, not of the code.
settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")
