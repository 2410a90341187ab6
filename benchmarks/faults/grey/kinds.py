"""The table of all kinds of grey failures."""

from benchmarks.faults.grey.subjects import clock, memory, network, resources, slow, stops

FAULTS = {fault.name: fault for subject in (stops, slow, network, resources, clock, memory) for fault in subject.FAULTS}
