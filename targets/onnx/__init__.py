"""The ONNX target: a graph of ONNX Runtime's operators, written with the onnx package, weights beside it."""
