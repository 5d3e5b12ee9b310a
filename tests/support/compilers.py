"""With which backends of torch.compile an op's graph is tested."""

#: (dynamic, backend): for fixed sizes what AOTAutograd traces is enough, and for any size inductor compiles the code
#: around the op, whose layouts it chooses. A C++ compiler takes ten seconds for each graph of inductor.
BACKENDS = [(False, "aot_eager"), (True, "inductor")]
