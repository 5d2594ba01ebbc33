"""What a run will take of memory and time, here or on GPUs, before it begins: `groupwise plan`.

* `kernels`, `rehearsal`: the engine's own code on tensors without memory: kernels, and what is held at most
* `machine`, `calibrate`: how long kernels take, by a GPU's datasheet or as this machine was measured
* `sampling`, `local`: a step of the local engine; `outlook`: a run here, and the smallest change with which it fits
* `cluster`: a step on GPUs, in closed form; `simulate`: the same with drawn lengths on 8 to 4,096 of them
* `report`: what the command prints
"""
