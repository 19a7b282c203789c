"""The numbers of SPIR-V 1.5 that we use (Khronos: SPIR-V Specification, sections 3.2–3.49; GLSL.std.450;
SPV_KHR_integer_dot_product).
"""

from __future__ import annotations

from enum import IntEnum


class Op(IntEnum):
    """Instructions."""

    NAME = 5
    EXTENSION = 10
    EXT_INST_IMPORT = 11
    EXT_INST = 12
    MEMORY_MODEL = 14
    ENTRY_POINT = 15
    EXECUTION_MODE = 16
    CAPABILITY = 17
    TYPE_VOID = 19
    TYPE_BOOL = 20
    TYPE_INT = 21
    TYPE_FLOAT = 22
    TYPE_VECTOR = 23
    TYPE_ARRAY = 28
    TYPE_RUNTIME_ARRAY = 29
    TYPE_STRUCT = 30
    TYPE_POINTER = 32
    TYPE_FUNCTION = 33
    CONSTANT_TRUE = 41
    CONSTANT_FALSE = 42
    CONSTANT = 43
    SPEC_CONSTANT = 50
    SPEC_CONSTANT_COMPOSITE = 51
    FUNCTION = 54
    FUNCTION_END = 56
    VARIABLE = 59
    LOAD = 61
    STORE = 62
    ACCESS_CHAIN = 65
    DECORATE = 71
    MEMBER_DECORATE = 72
    COMPOSITE_CONSTRUCT = 80
    COMPOSITE_EXTRACT = 81
    CONVERT_F_TO_U = 109
    CONVERT_F_TO_S = 110
    CONVERT_S_TO_F = 111
    CONVERT_U_TO_F = 112
    U_CONVERT = 113
    S_CONVERT = 114
    F_CONVERT = 115
    BITCAST = 124
    S_NEGATE = 126
    F_NEGATE = 127
    I_ADD = 128
    F_ADD = 129
    I_SUB = 130
    F_SUB = 131
    I_MUL = 132
    F_MUL = 133
    U_DIV = 134
    S_DIV = 135
    F_DIV = 136
    U_MOD = 137
    F_REM = 140
    F_MOD = 141
    IS_NAN = 156
    IS_INF = 157
    LOGICAL_EQUAL = 164
    LOGICAL_NOT_EQUAL = 165
    LOGICAL_OR = 166
    LOGICAL_AND = 167
    LOGICAL_NOT = 168
    SELECT = 169
    I_EQUAL = 170
    I_NOT_EQUAL = 171
    U_GREATER = 172
    S_GREATER = 173
    U_GREATER_EQUAL = 174
    S_GREATER_EQUAL = 175
    U_LESS = 176
    S_LESS = 177
    U_LESS_EQUAL = 178
    S_LESS_EQUAL = 179
    F_ORD_EQUAL = 180
    F_UNORD_NOT_EQUAL = 183
    F_ORD_LESS = 184
    F_ORD_GREATER = 186
    F_ORD_LESS_EQUAL = 188
    F_ORD_GREATER_EQUAL = 190
    SHIFT_RIGHT_LOGICAL = 194
    SHIFT_RIGHT_ARITHMETIC = 195
    SHIFT_LEFT_LOGICAL = 196
    BITWISE_OR = 197
    BITWISE_XOR = 198
    BITWISE_AND = 199
    NOT = 200
    BIT_FIELD_S_EXTRACT = 202
    BIT_COUNT = 205
    CONTROL_BARRIER = 224
    PHI = 245
    LOOP_MERGE = 246
    SELECTION_MERGE = 247
    LABEL = 248
    BRANCH = 249
    BRANCH_CONDITIONAL = 250
    RETURN = 253
    UNREACHABLE = 255
    GROUP_SHUFFLE = 345
    GROUP_SHUFFLE_XOR = 346
    GROUP_I_ADD = 349
    GROUP_F_ADD = 350
    GROUP_S_MIN = 353
    GROUP_U_MIN = 354
    GROUP_F_MIN = 355
    GROUP_S_MAX = 356
    GROUP_U_MAX = 357
    GROUP_F_MAX = 358
    S_DOT = 4450


class Capability(IntEnum):
    """What a module asks of the device; decision 8 says when each is declared."""

    SHADER = 1
    FLOAT16 = 9
    INT64 = 11
    GROUP_NON_UNIFORM = 61
    GROUP_NON_UNIFORM_ARITHMETIC = 63
    GROUP_NON_UNIFORM_SHUFFLE = 65
    STORAGE_BUFFER_16BIT = 4433
    STORAGE_BUFFER_8BIT = 4448
    DOT_PRODUCT_INPUT_4X8_PACKED = 6018
    DOT_PRODUCT = 6019


class Decoration(IntEnum):
    """Decorations."""

    SPEC_ID = 1
    BLOCK = 2
    ARRAY_STRIDE = 6
    BUILT_IN = 11
    RESTRICT = 19
    NON_WRITABLE = 24
    BINDING = 33
    DESCRIPTOR_SET = 34
    OFFSET = 35


class BuiltIn(IntEnum):
    """Built-in variables."""

    WORKGROUP_SIZE = 25
    WORKGROUP_ID = 26
    LOCAL_INVOCATION_ID = 27
    SUBGROUP_LOCAL_INVOCATION_ID = 41


class Storage(IntEnum):
    """Storage classes."""

    INPUT = 1
    WORKGROUP = 4
    FUNCTION = 7
    STORAGE_BUFFER = 12


class Glsl(IntEnum):
    """Instructions of the extended set GLSL.std.450."""

    ROUND_EVEN = 2
    TRUNC = 3
    F_ABS = 4
    S_ABS = 5
    FLOOR = 8
    CEIL = 9
    SIN = 13
    COS = 14
    TAN = 15
    ASIN = 16
    ACOS = 17
    ATAN = 18
    SINH = 19
    COSH = 20
    TANH = 21
    ASINH = 22
    ACOSH = 23
    ATANH = 24
    ATAN2 = 25
    POW = 26
    EXP = 27
    LOG = 28
    EXP2 = 29
    LOG2 = 30
    SQRT = 31
    INVERSE_SQRT = 32
    U_MIN = 38
    S_MIN = 39
    U_MAX = 41
    S_MAX = 42
    FMA = 50
    PACK_HALF_2X16 = 58
    UNPACK_HALF_2X16 = 62
    FIND_U_MSB = 75


# Operands that are numbers of their own enumerations.
ADDRESSING_LOGICAL, MEMORY_GLSL450 = 0, 1
GL_COMPUTE = 5
LOCAL_SIZE = 17
SCOPE_WORKGROUP, SCOPE_SUBGROUP = 2, 3
SEMANTICS_ACQUIRE_RELEASE, SEMANTICS_STORAGE_BUFFER, SEMANTICS_WORKGROUP = 0x8, 0x40, 0x100
GROUP_REDUCE = 0
LOOP_UNROLL = 1
PACKED_4X8 = 0
