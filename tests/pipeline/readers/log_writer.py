"""Recorder logs byte by byte, as CARLA's documentation of the binary format has them."""

import struct


def text(value):
    return struct.pack("<H", len(value.encode())) + value.encode()


def packet(kind, content=b""):
    return struct.pack("<BI", kind, len(content)) + content


def rows(kind, layout, values):
    return packet(
        kind, struct.pack("<H", len(values)) + b"".join(struct.pack("<" + layout, *value) for value in values)
    )


def header(town="Carla/Maps/Town05", magic="CARLA_RECORDER"):
    return struct.pack("<H", 1) + text(magic) + struct.pack("<q", 1_700_000_000) + text(town)


def added(actors):
    """``actors``: (id, kind, location cm, rotation deg, blueprint, attributes)."""
    content = struct.pack("<H", len(actors))
    for number, kind, location, rotation, blueprint, attributes in actors:
        content += struct.pack("<IB6fI", number, kind, *location, *rotation, 7) + text(blueprint)
        content += struct.pack("<H", len(attributes))
        for name, value in attributes.items():
            content += struct.pack("<B", 3) + text(name) + text(value)
    return packet(2, content)


def frame(number, duration_s, elapsed_s, *packets):
    return packet(0, struct.pack("<Qdd", number, duration_s, elapsed_s)) + b"".join(packets) + packet(1)


HERO, CAR, BIKE, WALKER, CONE, LIGHT, SIGN, SENSOR = 200, 201, 202, 203, 204, 3, 38, 210

ACTORS = [
    (LIGHT, 3, (3000, 500, 10), (0, 0, 90), "traffic.traffic_light", {}),
    (SIGN, 4, (0, 0, 0), (0, 0, 0), "traffic.speed_limit.30", {}),
    (HERO, 1, (1000, 200, 5), (0, 0, 0), "vehicle.lincoln.mkz_2020", {"role_name": "hero", "number_of_wheels": "4"}),
    (CAR, 1, (2000, 200, 5), (0, 0, 0), "vehicle.nissan.patrol", {"role_name": "autopilot", "number_of_wheels": "4"}),
    (BIKE, 1, (1500, 900, 5), (0, 0, 0), "vehicle.any.bike", {"number_of_wheels": "2"}),
    (WALKER, 2, (1200, 800, 90), (0, 0, 0), "walker.pedestrian.0001", {}),
    (CONE, 0, (2500, 0, 0), (0, 0, 45), "static.prop.mesh", {"mesh_path": "/Game/SM_ConstructionCone"}),
    (SENSOR, 5, (0, 0, 0), (0, 0, 0), "sensor.camera.rgb", {}),
]
BOXES = [
    (HERO, 0, 0, 75, 245, 92, 75),
    (CAR, -6, 2, 93, 230, 96, 92),
    (WALKER, 0, 0, 0, 18, 20, 90),
    (CONE, 0, 0, 29, 17, 17, 29),
]


def small_log(num_frames=6, town="Carla/Maps/Town05", unknown=True):
    """Eight actors for some frames of unequal length: the hero drives 10 m/s along CARLA's +y, with y growing to the right."""
    log, elapsed = header(town), 5.0
    for k in range(num_frames):
        step = 0.05 + 0.01 * (k % 2)
        pose = (0.0, 2.0, 90.0)  # roll, pitch, yaw
        positions = [
            (HERO, 1000, 200 + 1000 * (elapsed - 5), 5, *pose),
            (WALKER, 1200, 800, 90, 0, 0, -90),
            (CONE, 2500, 0, 0, 0, 0, 45),
            (SENSOR, 0, 0, 0, 0, 0, 0),
        ]
        if k < 4:
            positions += [(CAR, 2000, 200, 5, 0, 0, 180), (BIKE, 1500, 900, 5, 0, 0, 0)]
        packets = [
            added(ACTORS) if k == 0 else added([]),
            rows(3, "I", [(CAR,), (BIKE,)] if k == 4 else []),
            rows(4, "II", [(SENSOR, HERO)] if k == 0 else []),
            rows(5, "III??", [(0, HERO, CAR, True, False)] if k == 3 else []),
            rows(6, "I6f", positions),
            rows(7, "I?fB", [(LIGHT, False, 0.5, (0, 1, 2, 3, 4)[k % 5])] if k != 2 else []),
            rows(8, "I3f?i", [(HERO, 0.25, 0.5, 0.0, False, 2)]),
            rows(9, "If", [(WALKER, 0.0)]),
            rows(10, "II", [(HERO, 1)]),
            rows(12, "I6f", [(HERO, 0, 10, 0, 0, 0, 30)] if k else []),
            rows(13, "I6f", BOXES if k == 0 else []),
            packet(14, struct.pack("<d", elapsed)),
            rows(16, "I3f", [(LIGHT, 10, 3, 2)] if k == 0 else []),
            rows(17, "I6f", [(LIGHT, 100, -200, 50, 300, 50, 100)] if k == 0 else []),
        ]
        if unknown:
            packets.append(packet(200, b"from a later version"))
        log += frame(100 + k, step, elapsed, *packets)
        elapsed += step
    return log
