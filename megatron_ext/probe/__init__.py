"""What a device does where its documentation says nothing: one small experiment per assumption, a table of verdicts, and the fields of the
contract that follow (`tools/npu_probe.py`).

    report.py      verdicts, their JSON file, and the fields of ReductionOrder in it
    question.py    what an assumption is, and what is lost where it fails
    device.py      a device, or the host model, as the experiments see it
    cube.py, vector.py, flags.py    the assumptions
    run.py         asks all of them
"""
