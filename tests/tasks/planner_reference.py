"""Diffusion Planner's tensors by plain Python, one number at a time, written from the contract and from no other code here.

It takes tracks on the planner's grid, a lane graph, and the graph lanes on which the ego drove; it is slow, and meant to be read.
Numbers are Python floats (float64) and become float32 where a row is stored.
"""

import math
from collections import deque
from itertools import pairwise

import numpy as np

f32 = np.float32


def wrap(angle):
    return math.atan2(math.sin(angle), math.cos(angle))


def local(pose, x, y):
    c, s = math.cos(pose[2]), math.sin(pose[2])
    dx, dy = x - pose[0], y - pose[1]
    return c * dx + s * dy, -s * dx + c * dy


def turned(pose, vx, vy):
    c, s = math.cos(pose[2]), math.sin(pose[2])
    return c * vx + s * vy, -s * vx + c * vy


class Reference:
    def __init__(self, tracks, graph, params, driven):
        self.tracks, self.graph, self.params, self.driven = tracks, graph, params, driven
        self.driving = [
            i for i in range(graph.num_lanes) if graph.types[graph.type_index[i]] in ("driving", "bidirectional")
        ]

    # -- the ego -------------------------------------------------------------------------------------------------------

    def axle_offset(self, t):
        """World offset of the rear axle from the vehicle's origin, by three rotations one after the other."""
        roll, pitch, yaw = self.tracks.ego_rotation[t]
        x, y, z = self.params.rear_axle
        y, z = y * math.cos(roll) - z * math.sin(roll), y * math.sin(roll) + z * math.cos(roll)
        x, z = x * math.cos(pitch) + z * math.sin(pitch), -x * math.sin(pitch) + z * math.cos(pitch)
        return x * math.cos(yaw) - y * math.sin(yaw), x * math.sin(yaw) + y * math.cos(yaw)

    def pose(self, t):
        dx, dy = self.axle_offset(t)
        x, y, _ = self.tracks.ego_position[t]
        return x + dx, y + dy, self.tracks.ego_rotation[t][2]

    def broken(self, start, stop):
        """Whether the ego jumps, or the recording has a gap, somewhere after ``start`` up to ``stop``."""
        return any(self.tracks.is_break[t] for t in range(start + 1, stop + 1))

    def ego_current_state(self, t):
        tracks, params = self.tracks, self.params
        rate = 0.0
        if t > 0 and tracks.ego_valid[t - 1] and tracks.ego_valid[t] and not tracks.is_break[t]:
            rate = wrap(tracks.ego_rotation[t][2] - tracks.ego_rotation[t - 1][2]) / (
                tracks.time_s[t] - tracks.time_s[t - 1]
            )
        rx, ry = self.axle_offset(t)
        # A point of a rigid body: v + w x r, a + w x (w x r).
        vx, vy = tracks.ego_velocity[t] + np.array([-rate * ry, rate * rx])
        ax, ay = tracks.ego_acceleration[t] - rate**2 * np.array([rx, ry])
        vx, vy = turned(self.pose(t), vx, vy)
        ax, ay = turned(self.pose(t), ax, ay)
        steering = yaw_rate = 0.0
        if abs(vx) >= 0.2:
            steering = math.atan(rate * params.wheel_base_m / abs(vx))
            steering = max(-2 * math.pi / 3, min(2 * math.pi / 3, steering))
            yaw_rate = max(-0.95, min(0.95, rate))
        return [0.0, 0.0, 1.0, 0.0, vx, vy, ax, ay, steering, yaw_rate]

    def ego_agent_future(self, t):
        rows = []
        for k in range(1, self.params.future_steps + 1):
            there = t + k < self.tracks.num_steps and self.tracks.ego_valid[t + k] and not self.broken(t, t + k)
            if there:
                x, y, h = self.pose(t + k)
                rows.append(([*local(self.pose(t), x, y), wrap(h - self.pose(t)[2])], True))
            else:
                rows.append(([0.0, 0.0, 0.0], False))
        return rows

    # -- what is around it ---------------------------------------------------------------------------------------------

    def neighbours(self, t):
        """Indices of the chosen actors, by distance."""
        tracks = self.tracks
        pose = self.pose(t)
        here = []
        for a in range(tracks.num_actors):
            if tracks.actor_valid[t, a] and tracks.actor_class[a] in (0, 1, 2):
                x, y = local(pose, *tracks.actor_position[t, a][:2])
                if math.sqrt(x * x + y * y) <= self.params.agent_radius_m:
                    here.append((math.sqrt(x * x + y * y), a))
        here.sort()
        if len(here) <= self.params.num_agents:
            return [a for _, a in here]
        soft = [one for one in here if tracks.actor_class[one[1]] != 0]
        chosen = soft[: self.params.num_vulnerable] + [one for one in here if tracks.actor_class[one[1]] == 0]
        rest = soft[self.params.num_vulnerable :]
        while len(chosen) < self.params.num_agents and rest:
            chosen.append(rest.pop(0))
        return [a for _, a in sorted(chosen)][: self.params.num_agents]

    def neighbor_agents_past(self, t, a):
        tracks, pose = self.tracks, self.pose(t)
        states, later = [], None
        for back in range(self.params.past_steps + 1):
            there = t - back >= 0 and bool(tracks.actor_valid[t - back, a])
            if there:
                later = t - back
            states.append((later, there))
        rows = []
        for step, there in reversed(states):
            x, y = local(pose, *tracks.actor_position[step, a][:2])
            h = tracks.actor_heading[step, a] - pose[2]
            vx, vy = turned(pose, *tracks.actor_velocity[step, a])
            kind = [1.0 if tracks.actor_class[a] == k else 0.0 for k in range(3)]
            rows.append(
                (
                    [x, y, math.cos(h), math.sin(h), vx, vy, tracks.actor_width_m[a], tracks.actor_length_m[a], *kind],
                    there,
                )
            )
        return rows

    def neighbor_agents_future(self, t, a):
        tracks, pose = self.tracks, self.pose(t)
        rows = []
        for k in range(1, self.params.future_steps + 1):
            if t + k < tracks.num_steps and tracks.actor_valid[t + k, a]:
                x, y = local(pose, *tracks.actor_position[t + k, a][:2])
                rows.append(([x, y, wrap(tracks.actor_heading[t + k, a] - pose[2])], True))
            else:
                rows.append(([0.0, 0.0, 0.0], False))
        return rows

    def static_objects(self, t):
        tracks, pose = self.tracks, self.pose(t)
        found = []
        for a in range(tracks.num_actors):
            if tracks.actor_valid[t, a] and tracks.actor_class[a] >= 3:
                x, y = local(pose, *tracks.actor_position[t, a][:2])
                h = tracks.actor_heading[t, a] - pose[2]
                kind = [1.0 if tracks.actor_class[a] == k else 0.0 for k in range(3, 7)]
                row = [x, y, math.cos(h), math.sin(h), tracks.actor_width_m[a], tracks.actor_length_m[a], *kind]
                found.append((math.sqrt(x * x + y * y), a, row))
        return [row for _, _, row in sorted(found)[: self.params.num_static]]

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def lines(self, lane):
        """Centre, left, right in the plane, boundaries turned to run as the centre does."""
        rows = self.graph.points_of(lane)
        center = [tuple(p[:2]) for p in self.graph.center_m[rows].tolist()]
        sides = []
        for side in (self.graph.left_m[rows], self.graph.right_m[rows]):
            side = [tuple(p[:2]) for p in side.tolist()]
            if math.dist(side[-1], center[0]) < math.dist(side[0], center[0]):
                side = side[::-1]
            sides.append(side)
        return center, *sides

    def resampled(self, line):
        points = [line[0]]
        for point in line[1:]:
            if point != points[-1]:
                points.append(point)
        lengths = [math.dist(a, b) for a, b in pairwise(points)]
        total = sum(lengths)
        out = []
        for k in range(self.params.num_points):
            left, i = total * k / (self.params.num_points - 1), 0
            while i < len(lengths) - 1 and left > lengths[i]:
                left -= lengths[i]
                i += 1
            share = min(left / lengths[i], 1.0)
            (ax, ay), (bx, by) = points[i], points[i + 1]
            out.append((ax + share * (bx - ax), ay + share * (by - ay)))
        return out

    def polygon(self, lane):
        _, left, right = self.lines(lane)
        return left + right[::-1]

    def polygon_distance(self, polygon, x, y):
        inside, nearest = False, math.inf
        for (ax, ay), (bx, by) in zip(polygon, polygon[1:] + polygon[:1]):
            if (ay > y) != (by > y) and x < ax + (y - ay) / (by - ay) * (bx - ax):
                inside = not inside
            length2 = (bx - ax) ** 2 + (by - ay) ** 2
            share = max(0.0, min(1.0, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length2)) if length2 else 0.0
            nearest = min(nearest, math.dist((x, y), (ax + share * (bx - ax), ay + share * (by - ay))))
        return 0.0 if inside else nearest

    def near_lanes(self, t):
        """Graph lanes in the order of ``lanes``."""
        x, y, _ = self.pose(t)
        near = [
            lane for lane in self.driving if self.polygon_distance(self.polygon(lane), x, y) <= self.params.radius_m
        ]
        found = sorted((min(math.dist((x, y), point) for point in self.lines(lane)[0]), lane) for lane in near)
        return [lane for _, lane in found[: self.params.num_lanes]]

    def light(self, t, lane):
        """One-hot of green, yellow, red, unknown: of the light whose signal governs the lane, if it lies in a junction."""
        state = 3
        if self.graph.junction_id[lane] >= 0:
            for light, name in enumerate(self.tracks.light_signal):
                if name in self.graph.signals.ids:
                    governed = self.graph.signals.lanes_of(self.graph.signals.ids.index(name)).tolist()
                    entered = [
                        s
                        for g in governed
                        if self.graph.junction_id[g] < 0
                        for s in self.graph.successors_of(g).tolist()
                    ]
                    if lane in governed + entered:
                        state = int(self.tracks.light_state[t, light])
                        break
        if state == 1 and not self.params.marks_yellow:
            state = 3
        return [1.0 if state == k else 0.0 for k in range(4)]

    def lane_points(self, t, lane):
        pose = self.pose(t)
        center, left, right = ([local(pose, *p) for p in self.resampled(line)] for line in self.lines(lane))
        center, left, right = ([(f32(x), f32(y)) for x, y in line] for line in (center, left, right))
        rows = []
        for k in range(self.params.num_points):
            (x, y), (lx, ly), (rx, ry) = center[k], left[k], right[k]
            dx, dy = (center[k + 1][0] - x, center[k + 1][1] - y) if k + 1 < self.params.num_points else (0.0, 0.0)
            rows.append([x, y, dx, dy, lx - x, ly - y, rx - x, ry - y, *self.light(t, lane)])
        return rows

    def speed_limit(self, lane):
        has = bool(self.graph.has_speed_limit[lane])
        return (float(self.graph.speed_limit_mps[lane]) if has else 0.0), has

    # -- route ---------------------------------------------------------------------------------------------------------

    def block(self, lane):
        """What nuPlan calls a roadblock."""
        road, section, _ = self.graph.ids[lane].tolist()
        plain = (road, section, bool(self.graph.is_along_s[lane]))
        if self.graph.junction_id[lane] < 0:
            return plain
        before = [b for b in self.graph.predecessors_of(lane).tolist() if b in self.driving]
        after = [b for b in self.graph.successors_of(lane).tolist() if b in self.driving]
        if not before or not after or any(self.graph.junction_id[b] >= 0 for b in before + after):
            return plain
        return (int(self.graph.junction_id[lane]), self.block(before[0]), self.block(after[0]))

    def links(self, forward):
        found = {self.block(lane): [] for lane in self.driving}
        for lane in self.driving:
            for other in self.graph.successors_of(lane).tolist():
                if other in self.driving and self.block(other) != self.block(lane):
                    a, b = (lane, other) if forward else (other, lane)
                    found[self.block(a)].append(self.block(b))
        return found

    def search(self, start, targets, forward, depth):
        links, origin, queue = self.links(forward), {start: None}, deque([(start, 1)])
        while queue:
            block, at = queue.popleft()
            if block in targets:
                chain = []
                while block is not None:
                    chain.append(block)
                    block = origin[block]
                return chain[::-1]
            for other in links[block] if at < depth else []:
                if other not in origin:
                    origin[other] = block
                    queue.append((other, at + 1))
        return []

    def start(self, t, route):
        """The block on which the ego stands, and all that may be it."""
        x, y, heading = self.pose(t)
        away = {}
        for lane in self.driving:
            block = self.block(lane)
            away[block] = min(away.get(block, math.inf), self.polygon_distance(self.polygon(lane), x, y))
        near = [block for block, distance in away.items() if distance <= 1.0] or [min(away, key=away.get)]
        passing, least = {}, {}
        for block in near:
            for lane in self.driving:
                if self.block(lane) == block:
                    distance, error = self.deviation(lane, x, y, heading)
                    least[block] = min(least.get(block, math.inf), distance)
                    if error < math.pi / 4 and distance < 3.0:
                        passing[block] = min(passing.get(block, math.inf), distance)
        on_route = {block: distance for block, distance in passing.items() if block in route}
        for found in (on_route, passing, least):
            if found:
                return min(found, key=found.get), list(found)
        return None, []

    def deviation(self, lane, x, y, heading):
        """Distance from the nearest segment of the centre, and the difference in heading there."""
        found = (math.inf, 0.0)
        center = self.lines(lane)[0]
        for (ax, ay), (bx, by) in pairwise(center):
            length2 = (bx - ax) ** 2 + (by - ay) ** 2
            share = max(0.0, min(1.0, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length2))
            distance = math.dist((x, y), (ax + share * (bx - ax), ay + share * (by - ay)))
            if distance < found[0]:
                found = (distance, abs(wrap(math.atan2(by - ay, bx - ax) - heading)))
        return found

    def route(self, t):
        blocks = []
        for step in range(t, self.tracks.num_steps):
            if self.broken(t, step):
                break
            if self.driven[step] >= 0 and (not blocks or blocks[-1] != self.block(self.driven[step])):
                blocks.append(self.block(self.driven[step]))
        if not blocks:
            return []
        start, candidates = self.start(t, blocks)
        if start is not None and start not in blocks:
            back = self.search(blocks[0], candidates, False, 15)
            ahead = self.search(start, blocks[:3], True, 30)
            if back:
                blocks = back[::-1][:-1] + blocks
            elif ahead:
                blocks = ahead + blocks[blocks.index(ahead[-1]) + 1 :]
        linked = [blocks[0]]
        for before, block in pairwise(blocks):
            if block not in self.links(True)[before]:
                linked += self.search(before, [block], True, 30)[1:-1]
            linked.append(block)
        return list(dict.fromkeys(self.without_loops(linked)))

    def without_loops(self, blocks):
        seen = []
        for place, block in enumerate(blocks):
            lanes = [lane for lane in self.driving if self.block(lane) == block]
            if self.graph.junction_id[lanes[0]] >= 0:
                for other in seen:
                    others = [lane for lane in self.driving if self.block(lane) == other]
                    if block == other or any(self.shared_area(a, b) > 1.0 for a in lanes for b in others):
                        return blocks[:place]
                seen.append(block)
        return blocks

    def shared_area(self, a, b):
        """By a fine grid of points over one lane."""
        one, other = self.polygon(a), self.polygon(b)
        xs, ys = [p[0] for p in one], [p[1] for p in one]
        step, count = 0.25, 0
        for i in range(int((max(xs) - min(xs)) / step) + 1):
            for j in range(int((max(ys) - min(ys)) / step) + 1):
                x, y = min(xs) + (i + 0.5) * step, min(ys) + (j + 0.5) * step
                count += self.polygon_distance(one, x, y) == 0.0 and self.polygon_distance(other, x, y) == 0.0
        return count * step * step

    def route_lanes(self, t):
        near = self.near_lanes(t)
        there = {self.block(lane) for lane in near}
        run = []
        for block in self.route(t):
            if block in there:
                run.append(block)
            elif run:
                break
        return [lane for lane in near if self.block(lane) in run][: self.params.num_route_lanes]

    # -- all of it -----------------------------------------------------------------------------------------------------

    def sample(self, t):
        """Every tensor and mask of one step."""
        p, n = self.params, self.params.num_agents
        out = {
            "ego_current_state": np.zeros(10, f32),
            "ego_agent_future": np.zeros((p.future_steps, 3), f32),
            "ego_agent_future_valid": np.zeros(p.future_steps, bool),
            "neighbor_agents_past": np.zeros((n, p.past_steps + 1, 11), f32),
            "neighbor_agents_past_valid": np.zeros((n, p.past_steps + 1), bool),
            "neighbor_agents_future": np.zeros((n, p.future_steps, 3), f32),
            "neighbor_agents_future_valid": np.zeros((n, p.future_steps), bool),
            "static_objects": np.zeros((p.num_static, 10), f32),
            "static_objects_valid": np.zeros(p.num_static, bool),
        }
        for name, size in (("lanes", p.num_lanes), ("route_lanes", p.num_route_lanes)):
            out[name] = np.zeros((size, p.num_points, 12), f32)
            out[f"{name}_speed_limit"] = np.zeros((size, 1), f32)
            out[f"{name}_has_speed_limit"] = np.zeros((size, 1), bool)
            out[f"{name}_valid"] = np.zeros(size, bool)
        if not self.tracks.ego_valid[t]:
            return out
        out["ego_current_state"][:] = self.ego_current_state(t)
        self._store(out, "ego_agent_future", (), self.ego_agent_future(t))
        for slot, actor in enumerate(self.neighbours(t)):
            self._store(out, "neighbor_agents_past", slot, self.neighbor_agents_past(t, actor))
            self._store(out, "neighbor_agents_future", slot, self.neighbor_agents_future(t, actor))
        for slot, row in enumerate(self.static_objects(t)):
            out["static_objects"][slot], out["static_objects_valid"][slot] = row, True
        for name, lanes in (("lanes", self.near_lanes(t)), ("route_lanes", self.route_lanes(t))):
            for slot, lane in enumerate(lanes):
                out[name][slot] = self.lane_points(t, lane)
                out[f"{name}_speed_limit"][slot], out[f"{name}_has_speed_limit"][slot] = self.speed_limit(lane)
                out[f"{name}_valid"][slot] = True
        return out

    def _store(self, out, name, slot, rows):
        out[name][slot] = [row for row, _ in rows]
        out[f"{name}_valid"][slot] = [there for _, there in rows]
