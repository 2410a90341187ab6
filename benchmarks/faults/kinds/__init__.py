"""The table of all kinds of faults. Those of kills.py kill; grey ones, all others, kill nothing that they say nothing
of: processes are stopped or slow, networks break, disks, descriptors and memory run out, clocks jump."""

from benchmarks.faults.kinds import kills, network, resources, stalls

GREY = {fault.name: fault for subject in (stalls, network, resources) for fault in subject.FAULTS}
FAULTS = {fault.name: fault for fault in kills.FAULTS} | GREY
