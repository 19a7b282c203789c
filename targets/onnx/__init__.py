"""The ONNX target: a graph of ONNX Runtime's operators, written with the onnx package, with weights in files
beside it.
"""
