"""Leaves out the tests of extras that are not installed."""

from importlib.util import find_spec

NEEDS = {
    "PIL": ["test_gallery.py"],
    "av": ["test_video.py"],
    "scipy": ["test_generate_parts.py"],
    "httpx": [
        "test_dashboard.py",
        "test_reward_client.py",
        "test_reward_service.py",
        "test_reward_service_faults.py",
        "test_reward_service_unauthenticated.py",
    ],
}
collect_ignore = [file for module, files in NEEDS.items() if find_spec(module) is None for file in files]
