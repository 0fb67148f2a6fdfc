// Requests for curves: charts that become visible at the same time share one request.
import {get} from "./api.js";

const DELAY_MS = 40;
const MAX_METRICS = 24;

/** Loads the curves of a run, or of several runs to compare. One for each page, axis, and mode. */
export class CurveLoader {
  constructor(path, params) {
    this.path = path;
    this.params = params;
    this.waiting = new Map();
    this.timer = null;
  }

  /** Return a promise of {curve, answer} of one metric. */
  load(metric, {points = 400, exact = false} = {}) {
    return new Promise((resolve, reject) => {
      const key = `${points} ${exact}`;
      if (!this.waiting.has(key)) this.waiting.set(key, {points, exact, metrics: new Map()});
      const {metrics} = this.waiting.get(key);
      metrics.set(metric, [...(metrics.get(metric) || []), {resolve, reject}]);
      if (this.timer === null) this.timer = setTimeout(() => this.send(), DELAY_MS);
    });
  }

  send() {
    this.timer = null;
    const batches = [...this.waiting.values()];
    this.waiting.clear();
    for (const {points, exact, metrics} of batches) {
      const entries = [...metrics];
      while (entries.length) this.request(new Map(entries.splice(0, MAX_METRICS)), points, exact);
    }
  }

  async request(metrics, points, exact) {
    const params = {...this.params, metric: [...metrics.keys()], points, exact: exact ? 1 : null};
    try {
      const answer = await get(this.path, params);
      for (const [metric, calls] of metrics) {
        for (const call of calls) call.resolve({curve: answer.curves[metric] || null, answer});
      }
    } catch (error) {
      for (const calls of metrics.values()) for (const call of calls) call.reject(error);
    }
  }
}
