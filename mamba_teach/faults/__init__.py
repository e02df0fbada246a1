"""The museum of faults: real bugs of systems that serve recurrent models, each as a switch.

    from mamba_teach.faults import EXHIBITS, exhibit

    bug = exhibit("one-slot-gather")
    print(bug.card())
    with bug.fault():
        print(bug.observe().message)

Nothing else in the package imports this one, and production code has no flag for any of them.
"""

from mamba_teach.faults.exhibit import Exhibit, Finding, SeamGone
from mamba_teach.faults.museum import EXHIBITS, exhibit

__all__ = ["EXHIBITS", "Exhibit", "Finding", "SeamGone", "exhibit"]
