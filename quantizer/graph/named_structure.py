from quantizer.graph.ir import Graph
from quantizer.graph.structure import Structure
from quantizer.config.algorithms import Names
def named_structure(graph: Graph, found: Structure, names: Names) -> Structure:
    return found
